"""Replicas against one server: cost, conversations, killed replicas, changed rules."""
