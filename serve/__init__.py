"""Adapters -> patched vLLM: the guard engine, the guardrail server, the benchmarks, the
doctor."""
