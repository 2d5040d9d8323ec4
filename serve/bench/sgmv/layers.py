"""The linear layers of a base with random adapters, and the tokens that they get.

Knows nothing of how the products are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from guard.recipe import Recipe
from serve.bench.sgmv.batches import SgmvBatch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Layer:
    """A linear layer's adapters: A [slots, 1, rank, in] and B [slots, 1, out, rank] for each slice
    of its outputs.
    """

    inputs: int
    slices: tuple[int, ...]
    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]  # by columns, as the engine keeps them
    b_by_rows: tuple[torch.Tensor, ...]  # as vLLM keeps them


@dataclass(frozen=True)
class LayerWork:
    """A layer's tokens: x [tokens, in], and y [tokens, out], to which the products are added."""

    layer: Layer
    x: torch.Tensor
    y: torch.Tensor


def work_of(recipe: Recipe, batch: SgmvBatch, rank: int) -> list[LayerWork]:
    """All linear layers of the base, each with random tokens."""
    import torch

    dtype, work = getattr(torch, recipe.dtype), []
    layers: list[Layer] = []
    for seed in range(decoder_layers(recipe)):
        layers += layers_of(recipe, rank, batch.ranks, seed)
    for layer in layers:
        x = torch.randn(batch.tokens, layer.inputs).to(dtype)
        work.append(LayerWork(layer, x, torch.zeros(batch.tokens, sum(layer.slices)).to(dtype)))
    return work


def layers_of(recipe: Recipe, rank: int, ranks: Sequence[int], seed: int) -> list[Layer]:
    """One decoder layer's linear layers as vLLM packs them, in the recipe's dtype, with random
    adapters of these ranks; above its rank an adapter is zero.
    """
    import torch

    torch.manual_seed(seed)
    layers = []
    for inputs, slices in _shapes(recipe):
        a = [torch.randn(len(ranks), 1, rank, inputs) / inputs**0.5 for _ in slices]
        b = [torch.randn(len(ranks), 1, rank, outputs) for outputs in slices]
        for number in range(len(slices)):
            _zero_above_rank(a[number], ranks)
            _zero_above_rank(b[number], ranks)
        dtype = getattr(torch, recipe.dtype)
        by_columns = tuple(part.contiguous().to(dtype).mT for part in b)
        by_rows = tuple(part.contiguous() for part in by_columns)
        layers.append(
            Layer(inputs, slices, tuple(part.to(dtype) for part in a), by_columns, by_rows)
        )
    return layers


def decoder_layers(recipe: Recipe) -> int:
    """The number of decoder layers in the base."""
    layers: int = _config(recipe).num_hidden_layers
    return layers


def _shapes(recipe: Recipe) -> list[tuple[int, tuple[int, ...]]]:
    """The inputs and the slices of outputs of a decoder layer's linear layers: QKV, O, gate and up,
    down.
    """
    config = _config(recipe)
    heads, hidden, wide = config.num_attention_heads, config.hidden_size, config.intermediate_size
    head_size = getattr(config, "head_dim", None) or hidden // heads
    q, kv = heads * head_size, config.num_key_value_heads * head_size
    return [(hidden, (q, kv, kv)), (q, (hidden,)), (hidden, (wide, wide)), (wide, (hidden,))]


def _zero_above_rank(weights: torch.Tensor, ranks: Sequence[int]) -> None:
    """Zero the rows [slots, 1, rank, …] of each slot beyond its adapter's rank."""
    for slot, rank in enumerate(ranks):
        weights[slot, :, rank:] = 0


def _config(recipe: Recipe) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(recipe.base_path, revision=recipe.commit)
