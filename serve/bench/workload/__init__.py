"""What benchmarks put on an engine: prompts, adapters, traffic. Knows nothing of engines."""
