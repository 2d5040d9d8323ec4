"""Adapters and an LLM judge on the same test examples -> the quality table."""
