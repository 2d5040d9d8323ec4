"""What is wrong with an adapter is said before an engine sees it, with a remedy. Its configuration
is served as PEFT reads it, or refused by the name of a field.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_alora
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from pytest import MonkeyPatch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel
from vllm_alora import adapter
from vllm_alora.adapter import AdapterError, check_adapter, read_adapter
from vllm_alora.peft_config import HONOURED, ONLY_WITH, WITHOUT_EFFECT, is_adapted, unserved

from tests.serve.adapters import BASE
from train.adapter.settings import SERVED, SERVED_INITS

pytestmark = pytest.mark.slow

HF_CONFIG = AutoConfig.from_pretrained(BASE)
Q = "base_model.model.model.layers.0.self_attn.q_proj"
A = f"{Q}.lora_A.weight"
vllm_alora.register()
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path, adapters: dict[str, str]) -> Path:
    """A copy of a good aLoRA, to be broken."""
    return Path(shutil.copytree(adapters["first"], tmp_path / "adapter"))


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def check(
    folder: Path,
    max_lora_rank: int = 16,
    lora_dtype: torch.dtype = torch.bfloat16,
    hf_config: Any = HF_CONFIG,
) -> None:
    lora_config = SimpleNamespace(max_lora_rank=max_lora_rank, lora_dtype=lora_dtype)
    model_config = SimpleNamespace(hf_config=hf_config, dtype=torch.bfloat16)
    check_adapter(read_adapter(str(folder)), lora_config, model_config)


def refusal(folder: Path, **limits: Any) -> str:
    with pytest.raises(AdapterError) as caught:
        check(folder, **limits)
    assert isinstance(caught.value, ValueError) and str(folder) in str(caught.value)
    return str(caught.value)


def test_good_adapters_pass_and_the_base_s_layers_are_listed_once(
    adapters: dict[str, str], prompts: Any, monkeypatch: MonkeyPatch
) -> None:
    for path in adapters.values():
        check(Path(path))
        monkeypatch.setattr(adapter, "_build_layers", lambda _: pytest.fail("built again"))
    assert read_adapter(adapters["first"]).invocation == prompts.invocation("a rule")
    assert read_adapter(adapters["lora"]).invocation == ()


def test_a_file_that_is_missing_or_cannot_be_read_is_named(folder: Path) -> None:
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    assert "not a safetensors file" in refusal(folder)
    weights.write_bytes(content)
    config.write_text("{")
    assert "not a LoRA configuration" in refusal(folder)
    for file in (weights, config):
        file.unlink()
        assert f"the adapter has no {file.name}" in refusal(folder)
        # As a file that goes away between the look at it and the reading: the look succeeds.
        file.mkdir()
        assert "cannot be read" in refusal(folder)


def move_last_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".layers.5." in name]:
        tensors[name.replace(".layers.5.", ".layers.6.")] = tensors.pop(name)


NO_IDS = "must be a non-empty list of token ids"
LEFT_OUT = "PEFT leaves out a layer"
MAGNITUDE = {f"{Q}.lora_magnitude_vector": torch.ones(3)}
# Changed fields of the configuration, or a change of the tensors -> what is refused.
REFUSED: list[tuple[dict[str, Any] | Callable[[Tensors], object], str]] = [
    ({"peft_type": "IA3"}, "not a LoRA adapter (got IA3)"),
    ({"alora_invocation_tokens": []}, NO_IDS),
    ({"alora_invocation_tokens": "user"}, NO_IDS),
    ({"alora_invocation_tokens": [1.5]}, NO_IDS),
    ({"alora_invocation_tokens": [True]}, NO_IDS),
    ({"r": 8}, "needs A [8, in] and B [out, 8] (got A [16,"),
    ({"use_dora": True}, "PEFT acts on the adapter's use_dora, and the engine does not"),
    ({"target_modules": ["k_proj", "v_proj"]}, LEFT_OUT),
    ({"exclude_modules": ["q_proj"]}, LEFT_OUT),
    ({"layers_to_transform": [0]}, LEFT_OUT),
    ({"target_modules": r".*\.layers\.0\..*"}, LEFT_OUT),
    ({"target_modules": "("}, "its layers cannot be told"),
    (dict.clear, "the adapter has no tensors"),
    (lambda tensors: tensors.update(MAGNITUDE), "that is no LoRA weight (got "),
    (lambda tensors: tensors[A][0, 0].fill_(torch.nan), f"integer values (got {A})"),
    (lambda tensors: tensors[A][0, 0].fill_(torch.inf), f"integer values (got {A})"),
    (
        lambda tensors: tensors.pop(f"{Q}.lora_B.weight"),
        "q_proj needs A [16, in] and B [out, 16] (got A [16, 384], B [])",
    ),
    (move_last_layer, "does not fit the base model (got no such layer)"),
    (
        lambda tensors: tensors.update({A: torch.zeros(16, 1024)}),
        "does not fit the base model (got 1024 -> 384, where the model has 384 -> 384)",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_not_served_is_refused(folder: Path, change: Any, message: str) -> None:
    if isinstance(change, dict):
        change_config(folder, **change)
    else:
        change_tensors(folder, change)
    assert message in refusal(folder)


def test_what_the_engine_s_settings_exclude_is_refused(folder: Path) -> None:
    limit = refusal(folder, max_lora_rank=8)
    assert "LoRA rank 16 is greater than max_lora_rank 8" in limit
    assert "Leave lora_dtype at auto" in refusal(folder, lora_dtype=torch.float32)  # on a CPU


def test_an_adapter_of_the_output_layer_is_refused_on_a_cpu(folder: Path) -> None:
    layer = "base_model.model.lm_head"
    added = {f"{layer}.lora_A.weight": torch.zeros(16, 384)}
    added |= {f"{layer}.lora_B.weight": torch.zeros(16384, 16)}
    change_tensors(folder, lambda tensors: tensors.update(added))
    change_config(folder, target_modules=r".*\.\w+_proj|lm_head")
    assert "the embedding or the output layer is not served (got lm_head)" in refusal(folder)


def test_an_embedding_is_known_by_its_class_and_not_by_its_name(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, architectures=["GPT2LMHeadModel"])
    base = GPT2LMHeadModel(config)
    lora = LoraConfig(r=4, target_modules=["wte", "c_attn"], fan_in_fan_out=True)
    get_peft_model(base, lora).save_pretrained(str(tmp_path), save_embedding_layers=False)
    assert "is not served (got transformer.wte)" in refusal(tmp_path, hf_config=config)


def test_content_names_weights_and_configuration_and_is_read_once(
    folder: Path, adapters: dict[str, str]
) -> None:
    before = read_adapter(str(folder))
    assert before is read_adapter(str(folder))
    assert before.content == read_adapter(adapters["first"]).content
    change_tensors(folder, lambda tensors: tensors[A].add_(1))
    weights = read_adapter(str(folder))
    change_config(folder, lora_alpha=1)
    assert len({before.content, weights.content, read_adapter(str(folder)).content}) == 3
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    again = read_adapter(str(folder))
    assert again is read_adapter(str(folder))


LAYERS = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "model.layers.1.experts.0.down_proj",
    "layers.1.q_proj",
    "q_proj",
    "model.seq_proj",
]


@pytest.mark.parametrize(
    "name", [field.name for field in dataclasses.fields(LoraConfig) if field.init]
)
def test_every_field_of_peft_s_is_honoured_without_effect_or_refused(name: str) -> None:
    saved = LoraConfig(target_modules=["q_proj"]).to_dict()
    saved |= {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
    assert unserved(saved) is None
    is_served = name in HONOURED or name in WITHOUT_EFFECT
    assert unserved(saved | {name: {"on": 1}}) == (None if is_served else name)


def test_a_field_that_is_not_known_is_refused_unless_it_is_off() -> None:
    assert unserved({"peft_type": "LORA", "of_next_year": "magnitude"}) == "of_next_year"
    for off in (None, False, [], {}):
        assert unserved({"peft_type": "LORA", "of_next_year": off}) is None


def test_what_training_takes_is_served() -> None:
    assert {*HONOURED, *WITHOUT_EFFECT, *ONLY_WITH} >= SERVED
    assert set(ONLY_WITH["init_lora_weights"]) == set(SERVED_INITS)


TARGETS: list[Any] = [
    ["q_proj"],
    ["q_proj", "down_proj"],
    ["layers.1.self_attn.q_proj"],
    r".*\.q_proj",
    "q_proj",
    ["model.layers.0.self_attn.q_proj"],
]
OTHERS: list[dict[str, Any]] = [
    {},
    {"exclude_modules": ["q_proj"]},
    {"exclude_modules": r".*layers\.1\..*"},
    {"layers_to_transform": 1},
    {"layers_to_transform": [1, 11]},
    {"layers_to_transform": []},
    {"layers_to_transform": [1], "layers_pattern": "layers"},
    {"layers_to_transform": [0], "layers_pattern": ["blocks", "experts"]},
]


@pytest.mark.parametrize("others", OTHERS, ids=str)
@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_the_layers_are_those_that_peft_adapts(targets: Any, others: dict[str, Any]) -> None:
    if isinstance(targets, str) and "layers_to_transform" in others:
        pytest.skip("PEFT takes no numbers beside a pattern")
    config = LoraConfig(target_modules=targets, **others)
    fields = config.to_dict() | {"target_modules": targets}
    for layer in LAYERS:
        by_peft = check_target_module_exists(config, layer)
        is_excluded = type(by_peft).__name__ == "_ExcludedModule"
        assert is_adapted(fields, layer) == (bool(by_peft) and not is_excluded), layer
