"""Seams of the adapters' weights: reading them, their slots, and the batch's own."""
