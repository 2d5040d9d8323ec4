"""The card of a rule's weights: it comes back as written, and only with the weights it is of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from guard.errors import GuardError
from guard.method import PEFT_WEIGHTS
from guard.verdict import Calibration
from guard.weights.card import Card, load_card, weights_sha256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / PEFT_WEIGHTS).write_bytes(b"weights")
    card(tmp_path).save(tmp_path)
    return tmp_path


def card(folder: Path, **changes: Any) -> Card:
    fields: dict[str, Any] = {
        "rule": "pii_leak",
        "rule_text": "Keine persönlichen Daten.",
        "rule_hash": "r",
        "prompt_hash": "p",
        "method": "alora",
        "model": "tiny",
        "base": "recipes/models/tiny",
        "base_revision": "b",
        "data_hash": "d",
        "test_sha256": "t",
        "seed": 0,
        "versions": {"peft": "1"},
        "max_fpr": 0.05,
        "recipe": {"lora": {"target_modules": ["q_proj", "v_proj"]}},
        "metrics": {"auroc": 0.9, "auroc_ci95": [0.8, 1.0]},
        "temperature": 1.5,
        "bias": -0.5,
        "threshold": 0.25,
        "uncertainty_band": (0.2, 0.4),
        "weights_sha256": "",
    }
    if "weights_sha256" not in changes:
        changes["weights_sha256"] = weights_sha256(folder)
    return Card(**(fields | changes))


def test_a_card_comes_back_as_it_was_written(folder: Path) -> None:
    assert load_card(folder) == card(folder)
    assert load_card(folder).calibration == Calibration(1.5, 0.25, -0.5, (0.2, 0.4))
    assert "persönlichen" in (folder / "card.json").read_text(encoding="utf-8")
    assert not list(folder.glob("*.part"))


def test_other_weights_than_the_cards_are_refused(folder: Path) -> None:
    (folder / PEFT_WEIGHTS).write_bytes(b"tampered")
    with pytest.raises(GuardError, match="the weights are not those of the card"):
        load_card(folder)


def test_a_card_is_of_the_file_that_its_method_writes(tmp_path: Path) -> None:
    (tmp_path / "head.safetensors").write_bytes(b"weight and bias")
    sha256 = weights_sha256(tmp_path, "head.safetensors")
    card(tmp_path, method="head", weights_sha256=sha256).save(tmp_path)
    assert load_card(tmp_path).weights_sha256 == sha256
    (tmp_path / "head.safetensors").write_bytes(b"tampered")
    with pytest.raises(GuardError, match="the weights are not those of the card"):
        load_card(tmp_path)


def test_the_command_that_trains_again_is_of_these_weights_alone(
    folder: Path,
) -> None:
    assert card(folder).retrain == "make train RULE=pii_leak MODEL=tiny METHOD=alora"
    assert (
        card(folder, seed=2).retrain == "make train RULE=pii_leak MODEL=tiny METHOD=alora SEEDS=2"
    )


def test_a_folder_without_weights_or_card_is_not_an_adapter(folder: Path) -> None:
    (folder / PEFT_WEIGHTS).unlink()
    with pytest.raises(GuardError, match=f"no {PEFT_WEIGHTS}.*make train"):
        load_card(folder)
    shutil.rmtree(folder)
    with pytest.raises(
        GuardError, match=r"no card.json: not finished weights; there is no such folder.*make train"
    ):
        load_card(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temperature", 0.0, "'temperature': input should be greater than 0"),
        ("temperature", float("nan"), "'temperature': input should be"),
        ("threshold", float("nan"), "'threshold': input should be"),
        ("threshold", 1.5, "'threshold': input should be less than or equal to 1"),
        ("threshold", "0.5", "'threshold': input should be a valid number"),
        ("seed", 0.5, "'seed': input should be a valid integer"),
        ("method", "dora", "'method': no such method"),
        ("extra", 1, "unknown key 'extra'"),
    ],
)
def test_a_card_that_was_edited_wrongly_is_refused_by_key(
    folder: Path, key: str, value: object, message: str
) -> None:
    content = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    (folder / "card.json").write_text(json.dumps(content | {key: value}))
    with pytest.raises(GuardError, match=message):
        load_card(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[" + b"1, " * 10**6 + b"1]", "more than"),
        (b"[]", "'content': input should be an object"),
    ],
)
def test_a_card_that_is_no_card_is_refused(folder: Path, content: bytes, message: str) -> None:
    (folder / "card.json").write_bytes(content)
    with pytest.raises(GuardError, match=message):
        load_card(folder)
