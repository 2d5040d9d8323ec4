"""Two versions of rules' weights on recorded traffic, before one replaces the other: `make replay`.
Knows nothing of HTTP.
"""
