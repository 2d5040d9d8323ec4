"""The card of a rule's weights: it comes back as written, and only with the weights it is of. Its
version changes with all that decides an answer. The logits beside it come back bit for bit.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from guard.errors import GuardError
from guard.layout import fingerprint
from guard.method import PEFT_CONFIG, PEFT_WEIGHTS, WORDS
from guard.verdict import Calibration
from guard.weights.card import VERSION, Card, file_digests, load_card
from guard.weights.predictions import PREDICTIONS, read_predictions, write_predictions
from tests.signed import sign


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / PEFT_WEIGHTS).write_bytes(b"weights")
    (tmp_path / PEFT_CONFIG).write_text("{}")
    (tmp_path / WORDS).write_bytes(b"words")
    card(tmp_path).save(tmp_path)
    return tmp_path


FIELDS: dict[str, Any] = {
    **{"rule": "pii_leak", "rule_text": "Keine persönlichen Daten.", "rule_hash": "r"},
    **{"prompt_hash": "p", "answer_hash": "a", "data_hash": "d", "test_sha256": "t"},
    **{"method": "alora", "model": "tiny", "base": "recipes/models/tiny", "base_revision": "b"},
    **{"seed": 0, "versions": {"peft": "1"}, "max_fpr": 0.05, "coverage": None},
    "recipe": {"lora": {"target_modules": ["q_proj", "v_proj"]}},
    "metrics": {"auroc": 0.9, "auroc_ci95": [0.8, 1.0]},
    **{"temperature": 1.5, "bias": -0.5, "threshold": 0.25, "uncertainty_band": (0.2, 0.4)},
}


def card(folder: Path, **changes: Any) -> Card:
    fields = FIELDS | changes
    return Card(**fields, files=file_digests(folder, fields["method"]))


def test_a_card_comes_back_as_it_was_written_and_says_how_to_train_again(folder: Path) -> None:
    assert load_card(folder) == card(folder)
    assert load_card(folder).calibration == Calibration(1.5, 0.25, -0.5, (0.2, 0.4))
    assert "persönlichen" in (folder / "card.json").read_text(encoding="utf-8")
    assert not list(folder.glob("*.part"))
    command = "make train RULE=pii_leak MODEL=tiny METHOD=alora"
    assert card(folder).retrain == command
    assert card(folder, seed=2).retrain == f"{command} SEEDS=2"
    for judged in (card(folder, rule="reader"), card(folder, untrained="reader")):
        assert judged.remedy == "Train it again: `make reader MODEL=tiny`"


@pytest.mark.parametrize("name", [PEFT_WEIGHTS, PEFT_CONFIG, WORDS])
def test_a_file_that_is_not_the_cards_is_refused_by_name_and_signed_another_version(
    folder: Path, name: str
) -> None:
    before = load_card(folder).version
    (folder / name).write_bytes((folder / name).read_bytes() + b" ")
    with pytest.raises(GuardError, match=rf"{name} is another file \(got [0-9a-f]{{12}}\)"):
        load_card(folder)
    assert sign(folder).version == load_card(folder).version != before
    (folder / name).unlink()
    with pytest.raises(GuardError, match=f"{name}.*rain"):
        load_card(folder)


def test_a_card_is_of_the_files_that_its_method_writes_and_of_no_others(folder: Path) -> None:
    (folder / WORDS).unlink()
    sign(folder)
    assert load_card(folder)
    (folder / WORDS).write_bytes(b"words")
    with pytest.raises(GuardError, match=r"words\.safetensors is another file"):
        load_card(folder)
    head = folder / "head"
    head.mkdir()
    (head / "head.safetensors").write_bytes(b"weight and bias")
    card(head, method="head").save(head)
    assert list(load_card(head).files) == ["head.safetensors"]
    (head / "head.safetensors").write_bytes(b"tampered")
    with pytest.raises(GuardError, match="the weights are not those of the card"):
        load_card(head)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_every_field_is_part_of_the_version_and_an_edited_card_is_refused(folder: Path) -> None:
    before = load_card(folder)
    for key in Card.model_fields:
        other = Card.model_construct(**(dict(before) | {key: "another"}))
        assert other.version != before.version, key
    content = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    for change in ({"threshold": 0.9}, {"bias": 9.0}, {"rule_text": "x"}, {"reads": "user"}):
        (folder / "card.json").write_text(json.dumps(content | change))
        with pytest.raises(GuardError, match=r"card\.json: the card was edited.*make calibrate"):
            load_card(folder)


def test_another_layout_of_the_same_card_is_the_same_version_and_without_it_it_is_none(
    folder: Path,
) -> None:
    before = load_card(folder)
    content = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    (folder / "card.json").write_text(json.dumps(dict(sorted(content.items(), reverse=True))))
    assert load_card(folder).version == before.version == content.pop(VERSION)
    before.save(folder)
    assert load_card(folder) == before
    (folder / "card.json").write_text(json.dumps(content))
    with pytest.raises(GuardError, match=r"the card was edited.*\(got None\)"):
        load_card(folder)


WRONG: list[tuple[dict[str, object], str]] = [
    ({"temperature": 0.0}, "'temperature': input should be greater than 0"),
    ({"threshold": float("nan")}, "'threshold': input should be"),
    ({"threshold": "0.5"}, "'threshold': input should be a valid number"),
    ({"method": "dora"}, "'method': no such method"),
    ({"extra": 1}, "unknown key 'extra'"),
]


def test_a_folder_without_weights_or_whole_card_is_refused(folder: Path) -> None:
    (folder / PEFT_WEIGHTS).unlink()
    with pytest.raises(GuardError, match=f"no {PEFT_WEIGHTS}.*make train"):
        load_card(folder)
    content = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    edited = [(json.dumps(content | change), message) for change, message in WRONG]
    no_card = [("{", "not valid JSON"), ("[]", "'content': input should be an object")]
    for text, message in edited + no_card:
        (folder / "card.json").write_text(text)
        with pytest.raises(GuardError, match=message):
            load_card(folder)
    (folder / "card.json").unlink()
    with pytest.raises(GuardError, match=r"no card.json: not finished weights.*make train"):
        load_card(folder)
    shutil.rmtree(folder)
    with pytest.raises(GuardError, match=r"no such folder.*make train"):
        load_card(folder)


def test_logits_come_back_by_split_bit_for_bit_or_the_missing_file_is_refused(
    tmp_path: Path,
) -> None:
    logits = {"a": 0.1 + 0.2, "b": -17.0, "c\u2028d": 1e-300}
    rows = [(row_id, "test", logit) for row_id, logit in logits.items()]
    write_predictions(tmp_path, [*rows, ("a", "validation", 3.5)])
    assert read_predictions(tmp_path, "test", "") == logits
    assert read_predictions(tmp_path, "validation", "") == {"a": 3.5}
    assert read_predictions(tmp_path, "train", "") == {}
    with pytest.raises(GuardError, match=r"predictions.jsonl: no such file. Train it again"):
        read_predictions(tmp_path / "none", "test", "Train it again")


def test_a_line_that_is_no_prediction_is_named(tmp_path: Path) -> None:
    path = tmp_path / PREDICTIONS
    test_row = '{"id": "b", "split": "test", '
    for line in ('"logit": NaN}', '"logit": Infinity}', '"logit": null}', '"x": 1}', '"logit": 1'):
        write_predictions(tmp_path, [("a", "test", 1.0)])
        path.write_text(f"{path.read_text()}{test_row}{line}\n")
        with pytest.raises(GuardError, match=r"jsonl:2: not a prediction.*Train it again"):
            read_predictions(tmp_path, "test", "Train it again")


def test_a_card_of_before_there_were_twins_is_the_same_version(folder: Path) -> None:
    content = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    assert "max_fpr_twins" not in content and load_card(folder).twin_rate("test") is None
    assert fingerprint({key: content[key] for key in content if key != VERSION}) == content[VERSION]
    card(folder, max_fpr_twins=0.1).save(folder)
    assert load_card(folder).version != content[VERSION]
