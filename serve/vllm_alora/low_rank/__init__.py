"""Seams of the low-rank products: what adapters add to a layer's output, on a CPU and a GPU."""
