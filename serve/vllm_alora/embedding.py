"""Seams: the embedding of a base whose `quantization_config` says `embedding: int8` is in 8 bits.

vLLM has compressed-tensors' embedding in 8 bits by a Triton kernel, and for no output layer that is
tied to it. Here each row is rounded once it is loaded, with a scale of its own, and what is looked
up is made whole again. Remove when vLLM does that for a tied one on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from .seam import seam

SMALLEST = 1e-12  # the largest of values that are all zero


class Rounded(NamedTuple):
    """Of a weight whose rows are in int8: each row's scale, [rows, 1] float32, and its own type."""

    scales: torch.Tensor
    dtype: torch.dtype


class EightBitEmbedding(UnquantizedEmbeddingMethod):
    """Of an embedding, which it rounds, and of an output layer, which may be tied to one."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        whole: Any = layer
        weight = whole.weight
        if isinstance(layer, ParallelLMHead):
            if rounded_rows(weight) is None:
                super().process_weights_after_loading(layer)
            return
        values = weight.data.float()
        scales = values.abs().amax(1, keepdim=True).clamp_min(SMALLEST) / 127
        weight.rounded = Rounded(scales, weight.dtype)
        weight.data = (values * (1 / scales)).round().to(torch.int8)
        whole.use_fused_embedding = False  # which reads the weight by itself

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        rows = super().embedding(layer, input_)
        rounded = rounded_rows(layer.weight)
        if rounded is None:
            return rows
        return (rows * functional.embedding(input_, rounded.scales)).to(rounded.dtype)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        rounded = rounded_rows(layer.weight)
        if rounded is None:
            return super().apply(layer, x, bias)
        weight: Any = layer.weight
        return functional.linear(x, (weight * rounded.scales).to(x.dtype), bias)


def rounded_rows(weight: Any) -> Rounded | None:
    return getattr(weight, "rounded", None)


@seam(
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:"
    "CompressedTensorsConfig.get_quant_method",
    "self layer prefix",
)
def get_quant_method(original: Callable[..., Any], self: Any, layer: Any, prefix: str) -> Any:
    """vLLM's; of such a base an embedding, and an output layer that may be tied to it, are ours."""
    method = original(self, layer, prefix)
    is_ours = (self.config or {}).get("embedding") == "int8"
    if is_ours and method is None and isinstance(layer, VocabParallelEmbedding):
        return EightBitEmbedding()
    return method
