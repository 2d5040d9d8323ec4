"""The bag-of-words baseline: what can be had without a model."""
