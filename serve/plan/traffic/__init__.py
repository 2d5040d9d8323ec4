"""Checks that arrive: drawn from distributions, or read from a trace."""
