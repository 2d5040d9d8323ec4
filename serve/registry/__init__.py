"""Versions of rules, the aliases that name them, and the events that changed either."""
