"""Labelled conversations that an LLM writes and debates, behind any OpenAI-compatible endpoint."""
