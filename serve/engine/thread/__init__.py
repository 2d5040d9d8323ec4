"""A thread of its own for an engine, so that many callers share its batches.

Knows nothing of HTTP, and nothing of what computes. Importing this package imports neither torch
nor vLLM.
"""
