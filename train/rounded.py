"""A base in transformers whose linear layers compute what the engine's do in 8 bits: of rounded
weights, and of activations that are rounded token by token. Knows no recipes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from guard.made_base import WEIGHTS
from guard.quantized_base import SCALE

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST_SCALE = 1e-12  # of a token whose activations are all zero


def round_as_served(model: nn.Module, folder: Path) -> None:
    """Give the linear layers of `model` the weights in `folder`, and let them round what they read.
    Adapters beside a layer read it unrounded, as the engine's do.
    """
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        scaled = set(file.keys())
        for name, layer in model.named_modules():
            weight = f"{name}.weight"
            if isinstance(layer, nn.Linear) and weight + SCALE in scaled:
                levels = file.get_tensor(weight)
                whole = levels.float() * file.get_tensor(weight + SCALE)
                layer.weight.data = whole.to(layer.weight)
                layer.register_forward_pre_hook(partial(_read, levels.dtype))


def _read(dtype: torch.dtype, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (rounded(inputs[0], dtype),)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What `x` [..., in] is in a type of 8 bits. Each token has a scale of its own, by which its
    largest value is the type's. The gradient is that of `x`.
    """
    values, largest = x.detach().float(), LARGEST[dtype]
    scale = values.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_SCALE) / largest
    levels = values / scale
    if dtype == torch.int8:
        levels = levels.round()
    else:
        levels = levels.clamp(-largest, largest).to(dtype).float()
    return x + ((levels * scale).to(x.dtype) - x).detach()
