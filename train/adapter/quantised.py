"""The base in 4 bits, for training alone (QLoRA, Dettmers et al., 2023, arXiv 2305.14314).

An adapter that was trained on it is served on the base as it is, so its thresholds and its test
verdicts are made there too. Knows nothing of adapters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from guard.errors import GuardError
from guard.recipe import Recipe


def loading(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """The arguments of `from_pretrained` that load the recipe's base in 4 bits.

    Raises GuardError where this machine cannot.
    """
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=recipe.quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, recipe.dtype),
    )
    check(recipe, device)
    return {"quantization_config": config, "device_map": {"": device}}


def check(recipe: Recipe, device: torch.device) -> None:
    """Quantise a handful of weights.

    Raises GuardError where there is no bitsandbytes, or none that can on this device.
    """
    try:
        import bitsandbytes

        weights = torch.ones(64, 64, device=device)
        bitsandbytes.functional.quantize_4bit(weights, quant_type=recipe.quantization)
    except (ImportError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise GuardError(
            f"this machine cannot train in 4 bits: {error}",
            where=f"recipe {recipe.name}: quantization",
            got=recipe.quantization,
            remedy="Remove the key, or install a build of bitsandbytes for this machine",
        ) from error


def keep_trainable(model: nn.Module) -> None:
    """Keep bitsandbytes from packing weights for inference on a CPU in eval mode.

    Products with packed ones have no gradient.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
