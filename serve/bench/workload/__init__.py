"""What benchmarks put on an engine: prompts and adapters. Knows nothing of engines."""
