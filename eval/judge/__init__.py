"""The LLM judge that the adapters are measured against."""
