"""HTTP around the engine: one file a wire format, each with its own error body. Knows nothing of vLLM."""
