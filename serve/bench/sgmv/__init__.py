"""SGMV microbenchmark: a step's low-rank products, ours, vLLM's, a loop over adapters."""
