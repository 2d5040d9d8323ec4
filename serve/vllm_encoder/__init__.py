"""Encoders for vLLM that give out the states of a request's tokens under its own adapter.

What a rule makes of the states is the caller's: its head stands among the adapter's weights, and
vLLM leaves it out. vLLM loads this plugin in every one of its processes and calls `register`.
Importing this package imports nothing. Depends on vLLM alone, and on the seams of `vllm_alora` for
what is checked of adapters and how their products are computed on a CPU.
"""

from __future__ import annotations

MODELS = {
    "BertForGuarding": "vllm_encoder.bert:BertForGuarding",
    "RobertaForGuarding": "vllm_encoder.bert:RobertaForGuarding",
}


def register() -> None:
    """Make the models known to this process's vLLM. Idempotent."""
    from vllm import ModelRegistry

    for name, model_class in MODELS.items():
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, model_class)
