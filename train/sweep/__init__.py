"""Settings of one rule against each other."""
