"""Conversations, labelled and not, and how they are read from rows and requests."""
