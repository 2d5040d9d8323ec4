"""What benchmarks put on an engine: prompts, adapters, arrivals. Knows nothing of engines."""
