"""More conversations at once than the KV cache holds."""
