"""What a verdict costs on the host: Python around the model, split by cause."""
