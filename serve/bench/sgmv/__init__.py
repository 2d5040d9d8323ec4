"""SGMV microbenchmark: a step's low-rank products by our code, vLLM's, and a loop over adapters."""
