"""Seams: on a CPU the model is compiled although adapters are on.

vLLM's low-rank products on a CPU cannot be traced, so it does not compile there with adapters. Here
they are one operator, which the compiler does not look into. It finds its layer by name in the pass
under way, as vLLM's attention does: nothing of a step or an engine is compiled in. `enforce_eager`
leaves the compiler off. Remove when vLLM compiles with adapters on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import CompilationMode, get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

from ..seam import seam

SUFFIX = ".add_low_rank"  # of a layer's name among the layers that vLLM knows


@torch.library.custom_op("vllm_alora::add_low_rank", mutates_args=("output",))
def add_low_rank(output: torch.Tensor, x: torch.Tensor, layer_name: str) -> None:
    """Add to `output` [..., out] what a layer's adapters make of `x` [..., in], in place."""
    linear = get_forward_context().no_compile_layers[layer_name]
    linear.punica_wrapper.add_lora_linear(
        output.flatten(0, -2),
        x.flatten(0, -2),
        linear.lora_a_stacked,
        linear.lora_b_stacked,
        1.0,
        linear.output_slices,
    )


@add_low_rank.register_fake
def _(output: torch.Tensor, x: torch.Tensor, layer_name: str) -> None:
    """Do nothing while the model is traced: the operator makes no new tensor."""


@seam("vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.__init__", "self base_layer")
def init(original: Callable[..., None], self: Any, base_layer: Any) -> None:
    """Enter the layer among those that a pass finds by their names. Raises ValueError where another
    layer has its name and the model is to be compiled: one of the two would be computed with the
    other's adapters.
    """
    original(self, base_layer)
    config = get_current_vllm_config_or_none()
    if config is None:
        return
    self.low_rank_name = base_layer.prefix + SUFFIX
    compilation = config.compilation_config
    named = compilation.static_forward_context.setdefault(self.low_rank_name, self)
    is_compiled = compilation.mode != CompilationMode.NONE and current_platform.is_cpu()
    if named is not self and is_compiled:
        raise ValueError(
            f"vllm_alora: two layers of the model are called '{base_layer.prefix}', so it cannot "
            "be compiled with adapters. Start the engine with enforce_eager"
        )


@seam("vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA._apply_lora_to_output", "self x output")
def apply_lora_to_output(
    original: Callable[..., torch.Tensor], self: Any, x: torch.Tensor, output: torch.Tensor
) -> torch.Tensor:
    """The layer's output with its adapters: through the operator while the model is traced."""
    if not torch.compiler.is_compiling() or x.is_cuda:
        return original(self, x, output)
    torch.ops.vllm_alora.add_low_rank(output, x, self.low_rank_name)
    return output


@seam("vllm.platforms.cpu:CpuPlatform.check_and_update_config", "cls vllm_config")
def check_and_update_config(original: Callable[..., None], cls: Any, vllm_config: Any) -> None:
    """Set on a CPU what vLLM sets without adapters: nothing else in it depends on them."""
    lora_config = vllm_config.lora_config
    vllm_config.lora_config = None
    try:
        original(cls, vllm_config)
    finally:
        vllm_config.lora_config = lora_config
