"""Seams of the KV cache: which blocks adapters share, and what is scheduled first."""
