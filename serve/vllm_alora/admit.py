"""Seam: vLLM accepts aLoRA adapters.

vLLM reads `alora_invocation_tokens` only to refuse the adapter, rightly: without the other seams it
would apply the weights to the whole prompt. With them it is served as trained. Every other refusal
stays. Remove when vLLM serves aLoRA itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .seam import seam


@seam("vllm.lora.peft_helper:PEFTHelper._validate_features", "self")
def validate_features(original: Callable[[Any], list[str]], self: Any) -> list[str]:
    """Everything vLLM has against this adapter, apart from its being an aLoRA."""
    return original(dataclasses.replace(self, alora_invocation_tokens=None))
