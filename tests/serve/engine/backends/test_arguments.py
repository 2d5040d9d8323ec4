"""What vLLM is started with: its environment, and its arguments. The memory that a recipe gives is
filled and not exceeded, by real tensors' sizes.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from safetensors.torch import load_file
from transformers import AutoConfig

import guard.recipe
from guard.errors import GuardError
from guard.recipe import DEFAULT_MAX_RANK, MODELS, Recipe, ServingMemory, load_recipe
from serve.engine.adapter import ServableAdapter
from serve.engine.backends import arguments
from serve.engine.backends.arguments import (
    ALL_ADAPTERS,
    DEFAULTS,
    GIB,
    Sizes,
    encoder_args,
    engine_args,
    shared_out,
    sizes_of,
)
from tests.serve.cards import recipe
from tests.serve.guarded import save_adapter

SIZES = Sizes(token=1000, adapter=4_000_000, host_adapter=4_000_000, weights=10**8)
CONTEXT = 2000


@pytest.mark.parametrize("adapters", [1, 7, 100, 1000])
@pytest.mark.parametrize("device_gib", [0.01, 0.1, 1.0])
def test_the_memory_is_filled_and_not_exceeded(device_gib: float, adapters: int) -> None:
    found = shared_out(ServingMemory(device_gib=device_gib), SIZES, adapters, CONTEXT)
    total = found["max_loras"] * SIZES.adapter + found["kv_cache_memory_bytes"]
    assert total == pytest.approx(device_gib * GIB, abs=1)
    assert 1 <= found["max_loras"] <= adapters
    assert found["max_loras"] == adapters or found["max_loras"] * SIZES.adapter < total / 2
    assert found["kv_cache_memory_bytes"] >= CONTEXT * SIZES.token
    assert "max_cpu_loras" not in found


def test_slots_that_are_stated_are_counted_and_too_little_says_how_much_is_needed() -> None:
    stated = shared_out(ServingMemory(device_gib=1.0), SIZES, 10, CONTEXT, slots=100)
    assert stated == {"max_loras": 100, "kv_cache_memory_bytes": GIB - 100 * SIZES.adapter}
    with pytest.raises(GuardError, match=r"300 slots for adapters.*Give at least 1\.12"):
        shared_out(ServingMemory(device_gib=1.0), SIZES, 10, CONTEXT, slots=300)
    with pytest.raises(GuardError, match=r"Give at least 0\.01"):
        shared_out(ServingMemory(device_gib=0.001), SIZES, 10, CONTEXT)
    shared_out(ServingMemory(device_gib=0.0062), SIZES, 10, CONTEXT)


def test_host_memory_holds_as_many_adapters_as_fit() -> None:
    found = shared_out(ServingMemory(device_gib=1.0, host_gib=0.5), SIZES, 50, CONTEXT)
    assert found["max_cpu_loras"] == GIB // 2 // SIZES.adapter
    assert found["max_loras"] == 50
    tight = shared_out(ServingMemory(device_gib=1.0, host_gib=0.05), SIZES, 50, CONTEXT)
    assert tight["max_loras"] == tight["max_cpu_loras"] == 13  # each with a slot is kept there too


def test_the_sizes_are_those_of_an_adapter_and_of_a_token(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "one", "one", seed=1, rank=8)
    layers: dict[str, int] = {}  # bytes
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        layer = name.split(".")[-3]
        layers[layer] = layers.get(layer, 0) + tensor.numel() * tensor.itemsize
    sizes = sizes_of(recipe(), 8, sorted(layers))
    assert sizes.adapter == sizes.host_adapter == sum(layers.values())  # pinned beside a GPU alone
    attention = sizes_of(recipe(), 8, ["q_proj", "v_proj"])
    assert attention.adapter == layers["q_proj"] + layers["v_proj"]
    config = AutoConfig.from_pretrained(recipe().base_path)
    one_layer = 8 * (config.vocab_size + config.hidden_size) * 4
    assert sizes_of(recipe(), 8, ["lm_head"]).adapter == one_layer
    every_layer = sizes_of(recipe(), 8, None)  # embeddings and output layer too
    assert every_layer.adapter == sizes.adapter + 2 * one_layer
    heads = config.num_hidden_layers * config.num_key_value_heads
    assert sizes.token == 2 * heads * config.head_dim * 4
    unknown = r"lora_target_modules: qkv_proj.*down_proj, .*gate_proj, k_proj"
    with pytest.raises(GuardError, match=unknown):
        sizes_of(recipe(), 8, ["q_proj", "qkv_proj"])


@pytest.mark.usefixtures("own_cache")
def test_a_quantised_base_takes_less_and_is_what_vllm_loads(monkeypatch: MonkeyPatch) -> None:
    whole = recipe()
    int8, nf4 = (whole.model_copy(update={"serving_quantization": it}) for it in ("int8", "nf4"))
    loaded = engine_args(int8, [], {})["model"]
    made = load_file(Path(loaded) / "model.safetensors")
    in_layers = sum(tensor.numel() for tensor in made.values() if tensor.dtype == torch.int8)
    rounded = in_layers + made["model.embed_tokens.weight"].numel()
    sizes = [sizes_of(each, 8, None).weights for each in (whole, int8, nf4)]
    assert sizes == [sizes[0], sizes[0] - 3 * rounded, sizes[0] - 3.5 * in_layers]
    with pytest.raises(GuardError, match=r"plugin for bitsandbytes.*nf4.*make setup"):
        engine_args(nf4, [], {})
    monkeypatch.setattr(arguments, "find_spec", lambda _: True)
    assert engine_args(nf4, [], {})["quantization"] == "bitsandbytes"


def adapter_of(*modules: str) -> Any:
    card: Any = None  # no argument depends on it
    return ServableAdapter("rule", Path("folder"), card, frozenset(modules))


def with_engine(**engine: object) -> Recipe:
    """The tiny base's, with this section and nothing else in it, in float32 on any machine."""
    return recipe().model_copy(update={"engine": {"dtype": "float32", **engine}})


def test_the_caller_wins_over_the_recipe_and_the_recipe_over_the_defaults() -> None:
    of_recipe = with_engine(seed=1, block_size=16, max_model_len=512)
    args = engine_args(of_recipe, [], {"seed": 2})
    assert (args["seed"], args["block_size"], args["max_model_len"]) == (2, 16, 512)
    assert args["enable_prefix_caching"] is DEFAULTS["enable_prefix_caching"] is True
    assert (args["model"], args["dtype"]) == (recipe().base_path, recipe().dtype)
    assert engine_args(with_engine(), [], {})["max_model_len"] == recipe().context_tokens


def test_of_the_layers_that_are_named_those_are_prepared_that_an_adapter_has() -> None:
    of_recipe = with_engine(lora_target_modules=["q_proj", "o_proj", "up_proj"])

    def prepared(*adapters: ServableAdapter, **overrides: object) -> object:
        return engine_args(of_recipe, adapters, overrides)["lora_target_modules"]

    every = ["q_proj", "o_proj", "up_proj"]
    assert prepared(adapter_of("up_proj"), adapter_of("q_proj")) == ["q_proj", "up_proj"]
    assert prepared() == every
    assert prepared(adapter_of("q_proj"), adapter_of()) == every  # a pattern: they are not known
    assert prepared(adapter_of("other")) == every
    assert prepared(adapter_of("q_proj"), lora_target_modules=["o_proj"]) == ["o_proj"]


def test_host_memory_holds_every_adapter_to_come_and_at_least_one_for_every_slot() -> None:
    without_limits = with_engine().model_copy(update={"serving_memory": ServingMemory()})

    def kept(**overrides: object) -> object:
        return engine_args(without_limits, [adapter_of("q_proj")] * 5, overrides)["max_cpu_loras"]

    assert kept() == kept(max_loras=8) == ALL_ADAPTERS  # those too that are served later
    assert kept(max_loras=2, max_cpu_loras=3) == 3
    assert kept(max_loras=4, max_cpu_loras=3) == 4


def test_what_is_stated_wins_over_what_follows_from_the_memory() -> None:
    memory = ServingMemory(device_gib=1.0, host_gib=0.5)
    adapter = sizes_of(recipe(), DEFAULT_MAX_RANK, None).adapter

    def slots_and_cache(engine: dict[str, Any], adapters: int, **stated: int) -> tuple[int, int]:
        of_recipe = with_engine(**engine).model_copy(update={"serving_memory": memory})
        args = engine_args(of_recipe, [adapter_of("q_proj")] * adapters, stated)
        return args["max_loras"], args["kv_cache_memory_bytes"]

    assert slots_and_cache({}, 3) == (3, GIB - 3 * adapter)
    assert slots_and_cache({}, 0) == (1, GIB - adapter)  # an engine of heads alone
    assert slots_and_cache({}, 3, max_loras=7, kv_cache_memory_bytes=5) == (7, 5)
    # What the caller's slots leave is the cache's.
    assert slots_and_cache({"max_loras": 2}, 3, max_loras=7) == (7, GIB - 7 * adapter)
    with pytest.raises(GuardError, match="10000 slots for adapters"):
        slots_and_cache({}, 0, max_loras=10_000)


@pytest.fixture
def on_a_gpu(monkeypatch: MonkeyPatch) -> None:
    """As if torch were built for a GPU of 80 GiB."""
    monkeypatch.setattr(arguments, "installed_device", lambda: "cuda")
    monkeypatch.setattr(arguments, "_gpu_memory_bytes", lambda: 80 * GIB)


def narrow(**changes: object) -> Recipe:
    """The tiny base's in bfloat16, in training and in serving."""
    return load_recipe("tiny").model_copy(update={"dtype": "bfloat16", **changes})


@pytest.mark.usefixtures("on_a_gpu")
def test_on_a_gpu_float32_is_refused_with_the_line_to_write() -> None:
    problem = r"dtype: .*float32.*`dtype: \{cpu: float32, cuda: bfloat"
    minilm, without = load_recipe("minilm"), {"enable_lora": False}
    with pytest.raises(GuardError, match=problem):
        engine_args(recipe(), [], {})
    with pytest.raises(GuardError, match=problem):
        encoder_args(minilm, {})
    assert engine_args(recipe(), [], without) and encoder_args(minilm, without)
    engine_args(narrow(), [], {})


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.yaml")))
def test_every_recipe_has_a_dtype_that_a_gpu_reads(name: str, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(guard.recipe, "installed_device", lambda: "cuda")
    assert load_recipe(name).serving_dtype != "float32"


@pytest.mark.parametrize(
    ("device", "missing", "stated", "is_eager"),
    [
        ("cpu", None, {}, False),
        ("cpu", "g++", {}, True),
        ("cpu", None, {"enforce_eager": True}, True),
        ("cpu", "g++", {"enforce_eager": False}, False),
        ("cuda", "g++", {}, None),
    ],
)
def test_a_model_is_compiled_where_it_can_be(
    device: str, missing: str | None, stated: Any, is_eager: bool | None, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "installed_device", lambda: device)
    monkeypatch.setattr(arguments, "missing_for_compiling", lambda: missing)
    of_recipe = narrow(engine=stated, serving_memory=ServingMemory())
    assert engine_args(of_recipe, [], {}).get("enforce_eager") is is_eager


def test_settings_that_make_wrong_verdicts_are_refused(monkeypatch: MonkeyPatch) -> None:
    with pytest.raises(GuardError, match=r"specialize_active_lora.*wrong.*Leave it out"):
        engine_args(with_engine(specialize_active_lora=True), [], {})
    sharded = {"fully_sharded_loras": True}
    with pytest.raises(GuardError, match=r"got fully_sharded_loras.*Leave it out"):
        engine_args(narrow(), [], sharded)
    monkeypatch.setattr(arguments, "installed_device", lambda: "cuda")
    assert engine_args(narrow(serving_memory=ServingMemory()), [], sharded)["fully_sharded_loras"]


def test_the_output_layer_computes_in_float32_unless_the_recipe_says_otherwise() -> None:
    assert engine_args(narrow(), [], {})["hf_overrides"] == {"head_dtype": "float32"}
    longer = {"max_position_embeddings": 5}
    args = engine_args(narrow(), [], {"hf_overrides": longer})
    assert args["hf_overrides"] == {"head_dtype": "float32", **longer}
    named = {"hf_overrides": {"head_dtype": "model"}}
    assert engine_args(narrow(engine=named), [], {})["hf_overrides"] == named["hf_overrides"]


@pytest.mark.usefixtures("on_a_gpu")
def test_engines_beside_each_other_fit_into_a_gpu(monkeypatch: MonkeyPatch) -> None:
    """An encoder keeps no keys and values; vLLM would want 92 % of all memory to be free."""
    monkeypatch.setattr(guard.recipe, "installed_device", lambda: "cuda")
    of_part = narrow(serving_memory=ServingMemory(device_gib=8.0))
    weights = sizes_of(narrow(), 8, None).weights
    wanted = (weights + 8 * GIB + arguments.WORKSPACE_BYTES) / (80 * GIB)
    share = engine_args(of_part, [], {})["gpu_memory_utilization"]
    assert share == pytest.approx(wanted) and 2 * share < 1
    assert encoder_args(load_recipe("minilm"), {})["gpu_memory_utilization"] <= 0.05
    stated = {"gpu_memory_utilization": 0.5}
    for args in (engine_args(of_part, [], stated), encoder_args(load_recipe("minilm"), stated)):
        assert args["gpu_memory_utilization"] == 0.5
    whole = engine_args(narrow(serving_memory=ServingMemory(host_gib=1.0)), [], {})
    assert "gpu_memory_utilization" not in whole


@pytest.mark.usefixtures("on_a_gpu")
def test_host_memory_beside_a_gpu_is_counted_as_it_is_pinned() -> None:
    """In powers of two, tensor by tensor."""
    sizes = sizes_of(narrow(), 8, ["q_proj", "o_proj"])
    config = AutoConfig.from_pretrained(recipe().base_path)
    width = config.num_attention_heads * config.head_dim
    tensors = [8 * side * 2 for side in (config.hidden_size, width, width, config.hidden_size)]
    assert sizes.adapter == config.num_hidden_layers * sum(tensors)
    pinned = [2 ** math.ceil(math.log2(size)) for size in tensors]
    assert sizes.host_adapter == config.num_hidden_layers * sum(pinned) > sizes.adapter
    shared = shared_out(ServingMemory(host_gib=0.01), sizes, 10**6, CONTEXT)
    assert shared["max_cpu_loras"] * sizes.host_adapter <= 0.01 * GIB


READ_BY_VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def test_one_process_has_a_thread_a_core_unless_the_shell_differs() -> None:
    """And its environment is set before vLLM is imported."""
    code = (
        "import json, os, sys, serve.engine.backends.environment;"
        f"print(json.dumps([*map(os.environ.get, {list(READ_BY_VLLM)}), 'vllm' in sys.modules]))"
    )
    inherited = {name: value for name, value in os.environ.items() if name not in READ_BY_VLLM}
    for said in ({}, {"OMP_NUM_THREADS": "7", "VLLM_LOGGING_LEVEL": "INFO"}):
        found = subprocess.check_output([sys.executable, "-c", code], env=inherited | said)
        assert json.loads(found) == [*(READ_BY_VLLM | said).values(), False]
