"""Any OpenAI-compatible chat endpoint: its settings and its client."""
