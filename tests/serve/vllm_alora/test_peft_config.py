"""An adapter's configuration is served as PEFT reads it, or refused by the name of a field."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from vllm_alora.peft_config import HONOURED, ONLY_WITH, WITHOUT_EFFECT, is_adapted, unserved

from train.adapter.settings import SERVED, SERVED_INITS

LAYERS = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "model.layers.1.experts.0.down_proj",
    "layers.1.q_proj",
    "q_proj",
    "model.seq_proj",
]


def as_saved(**fields: Any) -> dict[str, Any]:
    config = LoraConfig(**fields).to_dict()
    config["peft_type"], config["task_type"] = "LORA", "CAUSAL_LM"
    return config


def test_what_peft_saves_by_default_is_served() -> None:
    assert unserved(as_saved(target_modules=["q_proj"], inference_mode=True)) is None


@pytest.mark.parametrize(
    "name", [field.name for field in dataclasses.fields(LoraConfig) if field.init]
)
def test_every_field_of_peft_s_is_honoured_without_effect_or_refused(name: str) -> None:
    is_served = name in HONOURED or name in WITHOUT_EFFECT
    saved = as_saved(target_modules=["q_proj"]) | {name: {"on": 1}}
    assert unserved(saved) == (None if is_served else name)


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


CASES = [  # PEFT takes no numbers beside a pattern
    (targets, others)
    for targets, others in itertools.product(TARGETS, OTHERS)
    if not (isinstance(targets, str) and "layers_to_transform" in others)
]


@pytest.mark.parametrize(("targets", "others"), CASES)
def test_the_layers_are_those_that_peft_adapts(targets: Any, others: dict[str, Any]) -> None:
    config = LoraConfig(target_modules=targets, **others)
    fields = config.to_dict() | {"target_modules": targets}
    for layer in LAYERS:
        by_peft = check_target_module_exists(config, layer)
        is_excluded = type(by_peft).__name__ == "_ExcludedModule"
        assert is_adapted(fields, layer) == (bool(by_peft) and not is_excluded), layer
