"""Seams: on a CPU the model is compiled although adapters are on.

vLLM switches its compiler off there as soon as an engine may have adapters, because its own
low-rank products on a CPU cannot be traced. Here they are one operator, which the compiler calls
and does not look into: it is named by its layer alone, so what a step does with its adapters is
read when it runs. The setting is vLLM's own: `enforce_eager` leaves the compiler off. Can go when
vLLM compiles with adapters on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

from .seam import seam

_numbers = itertools.count()
_layers: WeakValueDictionary[int, Any] = WeakValueDictionary()  # of all engines of this process


@torch.library.custom_op("vllm_alora::add_low_rank", mutates_args=("output",))
def add_low_rank(output: torch.Tensor, x: torch.Tensor, layer: int) -> None:
    """Add to `output` [..., out] what a layer's adapters make of `x` [..., in], in place."""
    linear = _layers[layer]
    linear.punica_wrapper.add_lora_linear(
        output.flatten(0, -2),
        x.flatten(0, -2),
        linear.lora_a_stacked,
        linear.lora_b_stacked,
        1.0,
        linear.output_slices,
    )


@add_low_rank.register_fake
def _(output: torch.Tensor, x: torch.Tensor, layer: int) -> None:
    """Nothing is made anew."""


@seam("vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.__init__", "self base_layer")
def init(original: Callable[..., None], self: Any, base_layer: Any) -> None:
    """Give the layer the number that the operator knows it by."""
    original(self, base_layer)
    self.number = next(_numbers)
    _layers[self.number] = self


@seam("vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA._apply_lora_to_output", "self x output")
def apply_lora_to_output(
    original: Callable[..., torch.Tensor], self: Any, x: torch.Tensor, output: torch.Tensor
) -> torch.Tensor:
    """The layer's output with its adapters: through the operator while the model is traced."""
    if not torch.compiler.is_compiling() or x.is_cuda:
        return original(self, x, output)
    torch.ops.vllm_alora.add_low_rank(output, x, self.number)
    return output


@seam("vllm.platforms.cpu:CpuPlatform.check_and_update_config", "cls vllm_config")
def check_and_update_config(original: Callable[..., None], cls: Any, vllm_config: Any) -> None:
    """What vLLM sets on a CPU, as for an engine without adapters: nothing else depends on them."""
    lora_config = vllm_config.lora_config
    vllm_config.lora_config = None
    try:
        original(cls, vllm_config)
    finally:
        vllm_config.lora_config = lora_config
