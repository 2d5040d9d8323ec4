"""The loop that owns the engines, on a thread of its own, so that many callers share its batches.
Knows nothing of HTTP, and nothing of what computes. Imports neither torch nor vLLM.
"""
