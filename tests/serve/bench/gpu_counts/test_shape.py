"""The shape is Qwen3-4B's: an adapter on it is as large as its recipe says."""

from __future__ import annotations

from guard.recipe import load_recipe
from serve.bench.gpu_counts.shape import LAYERS, PACKED_LAYERS

BYTES = 2  # of a bfloat16


def test_an_adapter_of_all_layers_has_the_size_that_the_recipe_states() -> None:
    rank = load_recipe("qwen3-4b").engine["max_lora_rank"]
    sides = 0
    for layer in PACKED_LAYERS:
        for width in layer.writes:
            sides += layer.reads + width
    assert round(sides * rank * BYTES * LAYERS / 1e6) == 132
