"""Heads: a logistic regression on a frozen base's states and the conversation's words."""
