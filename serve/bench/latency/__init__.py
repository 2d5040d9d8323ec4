"""The latency benchmark: 1 to 500 rules on one conversation, `make serve`."""
