"""Many replicas on paper: which one gets a check, and what it still has of the conversation."""
