"""The evaluated weights on an independent second test draw, beside the first."""
