"""The split against counted sizes and the engine's own arguments."""

from __future__ import annotations

import pytest

from guard.errors import GuardError
from guard.machine.device import installed_device
from guard.recipe import ServingMemory, load_recipe
from serve.engine.backends import arguments
from serve.engine.backends.arguments import GIB, Sizes, engine_args, sizes_of
from serve.plan.device.architecture import BYTES, shape_of
from serve.plan.device.memory import memory_left, sizes_by_shape, split_memory

SIZES = Sizes(token=10, adapter=1000, host_adapter=1000, weights=GIB)


def test_the_parts_fill_the_memory_and_not_more() -> None:
    memory = ServingMemory(device_gib=1e5 / GIB, host_gib=60_000 / GIB)
    split = split_memory(memory, SIZES, adapters=100, context_tokens=1000)
    # One conversation of 1,064 tokens first; half of what is left is for slots.
    assert split.slots == (100_000 - 10_640) // 2 // 1000 == 44
    assert split.adapters_bytes + split.cache_bytes == pytest.approx(100_000, abs=1)
    assert split.cache_tokens == split.cache_bytes // 10
    assert split.host_adapters == 60 and split.host_bytes == 60_000
    assert split.weights_bytes == GIB


def test_with_more_slots_than_adapters_the_host_holds_the_adapters() -> None:
    memory = ServingMemory(device_gib=1.0, host_gib=1.0)
    split = split_memory(memory, SIZES, adapters=3, context_tokens=1000, slots=8)
    assert (split.slots, split.host_adapters, split.host_bytes) == (8, 3, 3000)


def test_on_the_tiny_base_it_is_what_the_engine_is_started_with() -> None:
    recipe = load_recipe("tiny")
    targets = recipe.engine["lora_target_modules"]
    width = 2 if recipe.serving_dtype == "bfloat16" else 4
    shape = shape_of(recipe)
    tensors = shape.adapter_tensors(recipe.max_rank, targets)
    sizes = sizes_by_shape(shape, tensors, width, is_pinned=installed_device() == "cuda")
    assert sizes == sizes_of(recipe, recipe.max_rank, targets)
    split = split_memory(recipe.serving_memory, sizes, 0, recipe.context_tokens, slots=7)
    args = engine_args(recipe, [], {"max_loras": 7})
    assert split.slots == args["max_loras"]
    few = split_memory(recipe.serving_memory, sizes, 0, recipe.context_tokens)
    alone = engine_args(recipe, [], {})
    assert (few.slots, few.cache_bytes) == (alone["max_loras"], alone["kv_cache_memory_bytes"])


def test_beside_a_gpu_the_host_holds_what_the_engine_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("tiny")
    targets = recipe.engine["lora_target_modules"]
    shape = shape_of(recipe)
    tensors = shape.adapter_tensors(recipe.max_rank, targets)
    sizes = sizes_by_shape(shape, tensors, BYTES[recipe.serving_dtype], is_pinned=True)
    assert sizes.host_adapter > sizes.adapter
    monkeypatch.setattr(arguments, "installed_device", lambda: "cuda")
    assert sizes == sizes_of(recipe, recipe.max_rank, targets)


def test_without_a_figure_or_without_room_it_is_refused() -> None:
    with pytest.raises(GuardError, match="State `memory_gib`"):
        split_memory(ServingMemory(), SIZES, 1, 1000)
    with pytest.raises(GuardError, match="does not hold a conversation"):
        split_memory(ServingMemory(device_gib=1e-6), SIZES, 1, 1000)
    with pytest.raises(GuardError, match="does not fit into the device's memory"):
        memory_left(1.5, SIZES, workspace_gib=0.6)
    assert memory_left(4.0, SIZES, workspace_gib=0.5) == 2.5
