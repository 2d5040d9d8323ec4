"""Adapters -> patched vLLM: the guard engine, the guardrail server, the latency benchmark."""
