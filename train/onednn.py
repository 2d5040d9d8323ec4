"""Linear layers by oneDNN where PyTorch's own products are slow. Knows nothing of the model.
PyTorch multiplies float32 by MKL, which takes a slow path on an AMD. There is no gradient this way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from guard.machine.device import is_slow_in_mkl


@contextlib.contextmanager
def by_onednn(model: nn.Module) -> Iterator[None]:
    """Let oneDNN compute the float32 linear layers of `model` where MKL is slow on this CPU. For
    the duration, without gradients, and from the weights as they are. What is on a GPU, of another
    type or quantised stays as it is, and everything does where MKL is fast.
    """
    layers: list[nn.Module] = []
    if is_slow_in_mkl() and torch.backends.mkldnn.is_available():
        layers = [module for module in model.modules() if _is_plain_float32(module)]
    for layer in layers:
        layer.forward = functools.partial(_product, cast(nn.Linear, layer))
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's is found again


def _is_plain_float32(module: nn.Module) -> bool:
    """Whether it is a linear layer in float32 on the CPU, whose computation nothing has changed."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return module.weight.device.type == "cpu" and module.weight.dtype == torch.float32


def _product(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer's product, `[..., in]` -> `[..., out]`, as torch.compile has it computed."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        x, layer.weight, layer.bias, "none", [], ""
    )
    return product
