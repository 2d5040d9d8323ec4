"""A base in transformers that computes what the engine's does in 8 bits: linear layers of rounded
weights, which round what they read token by token, and an embedding of rows in int8. Knows no
recipes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TYPES: dict[str | None, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST = 1e-12  # the largest of values that are all zero


def round_as_served(model: Any, dtype: torch.dtype) -> None:
    """Round the weights of the linear layers but the output layer, by output channel, and let them
    round what they read. Adapters beside a layer read it unrounded, as the engine's do.
    """
    embedding = model.get_input_embeddings()
    embedding.weight.data = rounded(embedding.weight.data, torch.int8)
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer is not model.get_output_embeddings():
            layer.weight.data = rounded(layer.weight.data, dtype)
            layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0], dtype),))


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What `x` [..., in] is in a type of 8 bits, by which the largest value of each row is the
    type's. The gradient is that of `x`.
    """
    values = x.detach().float()
    scales = values.abs().amax(-1, keepdim=True).clamp_min(SMALLEST) / LARGEST[dtype]
    levels = values * (1 / scales)  # as vLLM: a quotient is rounded another way
    levels = levels.round() if dtype == torch.int8 else levels.to(dtype).float()
    return x + ((levels * scales).to(x.dtype) - x).detach()
