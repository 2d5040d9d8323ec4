"""The memory that a recipe gives is filled and not exceeded; the sizes are those of real tensors and files."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from guard.errors import GuardError
from guard.recipe import ServingMemory
from serve.engine.arguments import GIB, Sizes, shared_out, sizes_of
from tests.serve.guarded import recipe, save_adapter

SIZES = Sizes(token=1000, adapter=4_000_000)
CONTEXT = 2000


@pytest.mark.parametrize("adapters", [1, 7, 100, 1000])
@pytest.mark.parametrize("device_gib", [0.01, 0.1, 1.0])
def test_the_memory_is_filled_and_not_exceeded(device_gib: float, adapters: int) -> None:
    found = shared_out(ServingMemory(device_gib=device_gib), SIZES, adapters, CONTEXT)
    total = found["max_loras"] * SIZES.adapter + found["kv_cache_memory_bytes"]
    assert total == pytest.approx(device_gib * GIB, abs=1)
    assert 1 <= found["max_loras"] <= adapters
    assert found["kv_cache_memory_bytes"] >= CONTEXT * SIZES.token
    assert "max_cpu_loras" not in found


def test_with_room_for_all_every_adapter_has_a_place_and_conversations_have_the_rest() -> None:
    found = shared_out(ServingMemory(device_gib=1.0), SIZES, 10, CONTEXT)
    assert found["max_loras"] == 10
    assert found["kv_cache_memory_bytes"] == GIB - 10 * SIZES.adapter


def test_too_little_for_a_conversation_and_an_adapter_is_an_error_that_says_how_much_is_needed() -> (
    None
):
    with pytest.raises(GuardError, match=r"Give at least 0\.01"):
        shared_out(ServingMemory(device_gib=0.001), SIZES, 10, CONTEXT)
    shared_out(ServingMemory(device_gib=0.0062), SIZES, 10, CONTEXT)


def test_places_that_are_given_are_reckoned_with() -> None:
    found = shared_out(ServingMemory(device_gib=1.0), SIZES, 10, CONTEXT, slots=100)
    assert found == {"max_loras": 100, "kv_cache_memory_bytes": GIB - 100 * SIZES.adapter}
    with pytest.raises(GuardError, match=r"300 slots for adapters.*Give at least 1\.12"):
        shared_out(ServingMemory(device_gib=1.0), SIZES, 10, CONTEXT, slots=300)


def test_a_layer_that_the_base_has_not_is_named() -> None:
    with pytest.raises(
        GuardError, match=r"lora_target_modules: qkv_proj.*down_proj, .*gate_proj, k_proj"
    ):
        sizes_of(recipe(), 8, ["q_proj", "qkv_proj"])
    config = AutoConfig.from_pretrained(recipe().base_path)
    assert (
        sizes_of(recipe(), 8, ["lm_head"]).adapter
        == 8 * (config.vocab_size + config.hidden_size) * 4
    )


def test_host_memory_holds_as_many_adapters_as_fit() -> None:
    found = shared_out(ServingMemory(device_gib=1.0, host_gib=0.5), SIZES, 50, CONTEXT)
    assert found["max_cpu_loras"] == GIB // 2 // SIZES.adapter
    assert found["max_loras"] == 50
    tight = shared_out(ServingMemory(device_gib=1.0, host_gib=0.05), SIZES, 50, CONTEXT)
    assert (
        tight["max_loras"] == tight["max_cpu_loras"] == 13
    )  # each that has a place is kept in host memory too


def test_the_sizes_are_those_of_an_adapter_and_of_a_token(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "one", "one", seed=1, rank=8)
    tensors = load_file(folder / "adapter_model.safetensors")
    sizes = sizes_of(recipe(), 8, None)
    assert sizes.adapter == sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    config = AutoConfig.from_pretrained(recipe().base_path)
    assert (
        sizes.token
        == 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    )
    attention = (
        sum(
            tensor.numel()
            for name, tensor in tensors.items()
            if "q_proj" in name or "v_proj" in name
        )
        * 4
    )
    assert sizes_of(recipe(), 8, ["q_proj", "v_proj"]).adapter == attention
