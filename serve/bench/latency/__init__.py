"""The latency of one conversation against many rules."""
