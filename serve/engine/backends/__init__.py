"""What computes: vLLM in this process, for a decoder or for an encoder, as `Backend` wants it.
Knows nothing of rules, calls or cards. Importing this package imports neither torch nor vLLM.
"""
