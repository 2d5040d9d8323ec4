"""Builds the embedded tiny base: a Qwen3-shaped causal LM that reads a little English. `make
base`.
"""
