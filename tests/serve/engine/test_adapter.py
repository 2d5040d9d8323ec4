"""Which adapter folders are admitted, before any engine starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from guard.errors import GuardError
from guard.layout import Runs
from guard.method import PEFT_CONFIG, PEFT_WEIGHTS
from serve.engine.adapter import Requirements, trained
from tests.serve.cards import prompts, recipe
from tests.serve.guarded import adapter_folders, save_adapter
from tests.signed import sign


@pytest.fixture
def requirements() -> Requirements:
    return Requirements(recipe().base, recipe().base_revision, 16, prompts())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapter_folders()["medical_advice"], tmp_path / "medical_advice"))


def edited(folder: Path, **fields: object) -> None:
    path = folder / PEFT_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def configure(folder: Path, **fields: object) -> None:
    """Another configuration, as if the adapter had been trained so."""
    edited(folder, **fields)
    sign(folder)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("base_revision", "0" * 64, "another base"),
        ("base", "somebody/else", "another base"),
        ("rule_text", "The assistant may do as it likes.", "rule text"),
        ("prompt_hash", "0" * 64, "wording or layout of the prompt"),
        ("answer_hash", "0" * 64, "another way to compute a verdict"),
        ("composed_of", {"parent": "1"}, "without its report of interference is not served"),
        ("method", "lora", "'lora' must have the invocation tokens"),
    ],
)
def test_a_card_of_something_else_is_refused(
    requirements: Requirements, folder: Path, field: str, value: object, problem: str
) -> None:
    sign(folder, **{field: value})
    with pytest.raises(GuardError, match=problem):
        requirements.admit("rule", folder)


@pytest.mark.usefixtures("own_cache")
def test_weights_that_were_calibrated_on_another_base_are_refused(folder: Path) -> None:
    requirements = Requirements.of(recipe().model_copy(update={"serving_quantization": "int8"}))
    with pytest.raises(GuardError, match=r"another base \(got .*tiny [0-9a-f]+\).*make train"):
        requirements.admit("medical_advice", folder)
    sign(folder, base_revision=requirements.base_revision)
    requirements.admit("medical_advice", folder)
    with pytest.raises(GuardError, match=r"another base \(got .*tiny int8:"):
        Requirements.of(recipe()).admit("medical_advice", folder)


def test_layers_that_are_listed_by_their_whole_names_are_known(
    requirements: Requirements, folder: Path
) -> None:
    named = [f"model.layers.{number}.self_attn.q_proj" for number in range(2)]
    configure(folder, target_modules=[*named, "o_proj"])
    assert requirements.admit("rule", folder).modules == {"q_proj", "o_proj"}


def test_files_that_are_not_the_card_s_are_refused(
    requirements: Requirements, folder: Path
) -> None:
    for field in ("lora_alpha", "target_modules", "a_field_of_next_year"):
        edited(folder, **{field: 1})
        with pytest.raises(GuardError, match=r"not those of the card: adapter_config\.json"):
            requirements.admit("rule", folder)
    weights = folder / PEFT_WEIGHTS
    content = weights.read_bytes()
    sign(folder)
    for other in (content + b"\0", content[:-100]):
        weights.write_bytes(other)
        with pytest.raises(GuardError, match="not those of the card"):
            requirements.admit("rule", folder)


MANY = ", ".join(["1"] * 10**6)
CONFIG = r"adapter_config\.json"
# A whole configuration, None for none, or the fields that are others.
NOT_SERVED: list[tuple[bytes | dict[str, object] | None, str]] = [
    *(({"r": rank}, "between 1 and 16") for rank in (17, 0, "8", None)),
    *(({"alora_invocation_tokens": ids}, "invocation tokens") for ids in (None, [7, 11])),
    ({"alora_invocation_tokens": 7}, CONFIG),
    ({"alora_invocation_tokens": list(range(100_000))}, CONFIG),
    ({"alora_invocation_tokens": {"7": 1}}, CONFIG),
    ({"target_modules": [["q_proj"], {}]}, CONFIG),
    ({"use_dora": True}, "PEFT acts on the adapter's use_dora, .*got use_dora: "),
    ({"a_field_of_next_year": {"on": 1}}, "PEFT acts on the adapter's a_field_of_next_year"),
    (b"", CONFIG),
    (b"[]", CONFIG),
    (b"{}", CONFIG),  # without a type
    (b'{"peft_type": "IA3"}', CONFIG),
    (b"\xff", CONFIG),
    (b"[" * 100_000, CONFIG),
    (f'{{"peft_type": "LORA", "r": 8, "target_modules": [{MANY}]}}'.encode(), CONFIG),
    (None, CONFIG),
]


@pytest.mark.parametrize(("config", "problem"), NOT_SERVED)
def test_a_configuration_that_cannot_be_served_is_refused_and_not_quoted_at_length(
    requirements: Requirements, folder: Path, config: Any, problem: str
) -> None:
    if config is None:
        (folder / PEFT_CONFIG).unlink()
    elif isinstance(config, dict):
        configure(folder, **config)
    else:
        (folder / PEFT_CONFIG).write_bytes(config)
        sign(folder)
    with pytest.raises(GuardError, match=problem) as refused:
        requirements.admit("rule", folder)
    assert len(str(refused.value)) < 1000


def test_a_field_that_says_nothing_is_admitted(requirements: Requirements, folder: Path) -> None:
    configure(folder, bias="none", init_lora_weights=True, a_field_of_next_year=None)
    adapter = requirements.admit("renamed", folder)
    assert (adapter.name, adapter.card.rule) == ("renamed", "medical_advice")


@pytest.mark.parametrize("name", ["card.json", PEFT_CONFIG, PEFT_WEIGHTS])
def test_a_link_out_of_it_is_refused(requirements: Requirements, folder: Path, name: str) -> None:
    outside = folder.with_name("outside")
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(GuardError, match="leads out of its folder"):
        requirements.admit("rule", folder)


@pytest.mark.parametrize("linked", ["alora", "rule"])
def test_a_folder_that_is_a_link_out_of_the_runs_is_not_served(tmp_path: Path, linked: str) -> None:
    """The runs themselves may be a link."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    runs = Runs(tmp_path / "runs")
    save_adapter(runs.adapter("tiny", "pii_leak", "alora"), "pii_leak", seed=1)
    outside = save_adapter(tmp_path / "outside" / "alora", "medical_advice", seed=2)
    place = runs.adapter("tiny", "medical_advice", "alora")
    if linked == "rule":
        place.parent.symlink_to(outside.parent)
    else:
        place.parent.mkdir(parents=True)
        place.symlink_to(outside)
    for selection in (None, "medical_advice"):
        with pytest.raises(GuardError, match="leads out of"):
            trained(runs, "tiny", "alora", selection)
    assert list(trained(runs, "tiny", "alora", "pii_leak")) == ["pii_leak"]


def test_the_trained_adapters_are_the_finished_ones_of_seed_zero(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    with pytest.raises(GuardError, match="make train"):
        trained(runs, "tiny", "alora")
    for rule, seed in (("pii_leak", 0), ("medical_advice", 0), ("medical_advice", 1)):
        save_adapter(runs.adapter("tiny", rule, "alora", seed), rule, seed=seed)
    runs.adapter("tiny", "unfinished", "alora").mkdir(parents=True)
    assert list(trained(runs, "tiny", "alora")) == ["medical_advice", "pii_leak"]
    pii_leak = runs.adapter("tiny", "pii_leak", "alora")
    assert trained(runs, "tiny", "alora", "pii_leak") == {"pii_leak": pii_leak}
    with pytest.raises(GuardError, match=r"jailbreak.*Trained: medical_advice, pii_leak"):
        trained(runs, "tiny", "alora", "pii_leak,jailbreak")
    with pytest.raises(GuardError, match="name a method that has weights: alora"):
        trained(runs, "tiny", "lora")
