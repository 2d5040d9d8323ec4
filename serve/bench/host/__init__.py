"""The cost of a verdict on the host: Python around the model, split by cause."""
