"""Tenants: who may ask what, how much of it at once, and by which keys.

Knows nothing of engines and of HTTP.
"""
