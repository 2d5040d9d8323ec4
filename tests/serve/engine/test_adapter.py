"""Which adapter folders are admitted, before any engine starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.layout import Runs
from guard.method import PEFT_CONFIG
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


def configure(folder: Path, **fields: object) -> None:
    """Another configuration, as if the adapter had been trained so."""
    path = folder / PEFT_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    sign(folder)


def test_a_trained_folder_is_admitted_with_its_card(
    requirements: Requirements, folder: Path
) -> None:
    adapter = requirements.admit("renamed", folder)
    assert (adapter.name, adapter.card.rule) == ("renamed", "medical_advice")


def test_an_adapter_of_another_base_is_refused(requirements: Requirements, folder: Path) -> None:
    for field, value in (("base_revision", "0" * 64), ("base", "somebody/else")):
        kept = (folder / "card.json").read_text()
        sign(folder, **{field: value})
        with pytest.raises(GuardError, match="another base"):
            requirements.admit("rule", folder)
        (folder / "card.json").write_text(kept)


def test_weights_that_are_not_the_cards_are_refused(
    requirements: Requirements, folder: Path
) -> None:
    with (folder / "adapter_model.safetensors").open("ab") as weights:
        weights.write(b"\0")
    with pytest.raises(GuardError, match="not those of the card"):
        requirements.admit("rule", folder)


def test_a_rule_text_that_was_changed_after_training_is_refused(
    requirements: Requirements, folder: Path
) -> None:
    sign(folder, rule_text="The assistant may do as it likes.")
    with pytest.raises(GuardError, match="rule text"):
        requirements.admit("rule", folder)


def test_an_adapter_trained_on_another_prompt_is_refused(
    requirements: Requirements, folder: Path
) -> None:
    sign(folder, prompt_hash="0" * 64)
    with pytest.raises(GuardError, match="wording or layout of the prompt"):
        requirements.admit("rule", folder)


def test_an_adapter_trained_for_other_code_that_answers_is_refused(
    requirements: Requirements, folder: Path
) -> None:
    sign(folder, answer_hash="0" * 64)
    with pytest.raises(GuardError, match="another way to compute a verdict"):
        requirements.admit("rule", folder)


CONFIG_FIELDS = {
    "use_rslora": True,
    "lora_alpha": 1,
    "r": 8,
    "target_modules": ["q_proj"],
    "alora_invocation_tokens": [1],
    "bias": "all",
    "use_dora": True,
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 1},
    "modules_to_save": ["lm_head"],
    "exclude_modules": ["q_proj"],
    "layers_to_transform": [0],
    "fan_in_fan_out": True,
    "a_field_of_next_year": 1,
}


@pytest.mark.parametrize(("field", "value"), CONFIG_FIELDS.items())
def test_a_configuration_that_was_edited_alone_is_refused(
    requirements: Requirements, folder: Path, field: str, value: object
) -> None:
    path = folder / PEFT_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(GuardError, match=r"not those of the card: adapter_config\.json"):
        requirements.admit("rule", folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "all"),
        ("use_dora", True),
        ("init_lora_weights", "pissa"),
        ("target_parameters", ["experts.w"]),
        ("trainable_token_indices", [1]),
        ("a_field_of_next_year", {"on": 1}),
    ],
)
def test_a_field_that_the_engine_would_ignore_is_refused_by_name(
    requirements: Requirements, folder: Path, field: str, value: object
) -> None:
    configure(folder, **{field: value})
    with pytest.raises(GuardError, match=f"PEFT acts on the adapter's {field}, .*got {field}: "):
        requirements.admit("rule", folder)
    configure(folder, **{field: {"bias": "none", "init_lora_weights": True}.get(field)})
    assert requirements.admit("rule", folder)


@pytest.mark.parametrize("rank", [17, 0, "8", None])
def test_a_rank_outside_the_limit_is_refused_with_the_limit(
    requirements: Requirements, folder: Path, rank: object
) -> None:
    configure(folder, r=rank)
    with pytest.raises(GuardError, match="between 1 and 16"):
        requirements.admit("rule", folder)


@pytest.mark.parametrize("invocation", [None, [], [7, 11, 13]])
def test_an_alora_with_another_invocation_than_the_prompts_is_refused(
    requirements: Requirements, folder: Path, invocation: object
) -> None:
    configure(folder, alora_invocation_tokens=invocation)
    with pytest.raises(GuardError, match="invocation tokens"):
        requirements.admit("rule", folder)


def test_a_lora_that_is_really_an_alora_is_refused(
    requirements: Requirements, folder: Path
) -> None:
    sign(folder, method="lora")
    with pytest.raises(GuardError, match="'lora' must have the invocation tokens"):
        requirements.admit("rule", folder)


MANY = ", ".join(["1"] * 10**6)
MALFORMED = {
    "empty": b"",
    "a list": b"[]",
    "without a type": b"{}",
    "of another type": b'{"peft_type": "IA3"}',
    "no UTF-8": b"\xff",
    "nested": b"[" * 100_000,
    "a million entries": f'{{"peft_type": "LORA", "r": 8, "target_modules": [{MANY}]}}'.encode(),
    "a million keys": str({str(key): 1 for key in range(10**6)}).replace("'", '"').encode(),
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_configuration_is_refused_by_name(
    requirements: Requirements, folder: Path, content: bytes
) -> None:
    (folder / PEFT_CONFIG).write_bytes(content)
    sign(folder)
    with pytest.raises(GuardError, match=r"adapter_config\.json") as refused:
        requirements.admit("rule", folder)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_modules", [["q_proj"], {}]),
        ("alora_invocation_tokens", 7),
        ("alora_invocation_tokens", list(range(100_000))),
        ("alora_invocation_tokens", {"7": 1}),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name_and_not_quoted_at_length(
    requirements: Requirements, folder: Path, field: str, value: object
) -> None:
    configure(folder, **{field: value})
    with pytest.raises(GuardError, match=r"adapter_config\.json") as refused:
        requirements.admit("rule", folder)
    assert len(str(refused.value)) < 1000


def test_a_weights_file_that_was_cut_off_is_refused(
    requirements: Requirements, folder: Path
) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(GuardError, match="not those of the card"):
        requirements.admit("rule", folder)


@pytest.mark.parametrize("name", ["card.json", "adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_a_link_out_of_its_folder_is_refused(
    requirements: Requirements, folder: Path, name: str
) -> None:
    outside = folder.with_name("outside")
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(GuardError, match="leads out of its folder"):
        requirements.admit("rule", folder)


@pytest.mark.parametrize("linked", ["alora", "rule"])
def test_a_folder_that_is_a_link_out_of_the_runs_is_not_served(tmp_path: Path, linked: str) -> None:
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


def test_the_runs_themselves_may_be_a_link(tmp_path: Path) -> None:
    save_adapter(Runs(tmp_path / "disk").adapter("tiny", "pii_leak", "alora"), "pii_leak", seed=1)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    assert list(trained(Runs(tmp_path / "runs"), "tiny", "alora")) == ["pii_leak"]


def test_a_folder_without_a_configuration_is_refused_by_name(
    requirements: Requirements, folder: Path
) -> None:
    (folder / "adapter_config.json").unlink()
    with pytest.raises(GuardError, match=r"adapter_config\.json"):
        requirements.admit("rule", folder)


def test_the_trained_adapters_are_the_finished_ones_of_seed_zero(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    for rule, seed in (("pii_leak", 0), ("medical_advice", 0), ("medical_advice", 1)):
        save_adapter(runs.adapter("tiny", rule, "alora", seed), rule, seed=seed)
    runs.adapter("tiny", "unfinished", "alora").mkdir(parents=True)
    assert list(trained(runs, "tiny", "alora")) == ["medical_advice", "pii_leak"]
    assert trained(runs, "tiny", "alora", "pii_leak") == {
        "pii_leak": runs.adapter("tiny", "pii_leak", "alora")
    }


def test_a_selected_rule_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="make train"):
        trained(Runs(tmp_path), "tiny", "alora")
    save_adapter(Runs(tmp_path).adapter("tiny", "pii_leak", "alora"), "pii_leak", seed=0)
    with pytest.raises(GuardError, match=r"jailbreak.*Trained: pii_leak"):
        trained(Runs(tmp_path), "tiny", "alora", "pii_leak,jailbreak")
