import json
import random
import sys
from pathlib import Path

import pytest

from data import build as command
from data.build import GENERATOR, build
from data.generate import Counts
from guard.errors import GuardError
from guard.example import SPLITS, read_examples
from guard.rule import RULES, load_rule

SMALL = Counts(train=16, validation=8, test=8)


@pytest.mark.parametrize("name", sorted(path.stem for path in RULES.glob("*.yaml")))
def test_every_rule_file_is_complete_and_its_text_is_short(name: str) -> None:
    rule = load_rule(name)
    assert 5 <= len(rule.text.split()) <= 15
    assert 15 <= len(rule.policy.split()) <= 50
    assert rule.text.startswith(f"The {rule.judged} must not ")
    assert {example.violates for example in rule.examples} == {True, False}


def test_an_unknown_rule_gives_the_nearest_name() -> None:
    with pytest.raises(GuardError, match="Did you mean 'medical_advice'"):
        load_rule("medical_advise")


def test_a_build_writes_splits_and_manifest_and_the_same_bytes_again(tmp_path: Path) -> None:
    rule = load_rule("refund_promise")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        assert build(rule, GENERATOR, SMALL, 0, "keep", folder)
    for name in (*(f"{split}.jsonl" for split in SPLITS), "manifest.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    assert [row["rows"] for row in manifest["counts"]] == [16, 8, 4, 4]
    assert len(read_examples(folders[0] / "test.jsonl")) == 8


def test_a_build_is_not_redone_until_an_input_changes_or_a_file_is_gone(tmp_path: Path) -> None:
    rule = load_rule("refund_promise")
    assert build(rule, GENERATOR, SMALL, 0, "keep", tmp_path)
    assert not build(rule, GENERATOR, SMALL, 0, "keep", tmp_path)
    assert build(rule, GENERATOR, SMALL, 1, "keep", tmp_path)
    assert build(rule.model_copy(update={"policy": rule.policy + " Always."}), GENERATOR, SMALL, 1, "keep", tmp_path)
    assert build(rule, GENERATOR, SMALL, 1, "keep", tmp_path, force=True)
    (tmp_path / "train.jsonl").unlink()
    assert build(rule, GENERATOR, SMALL, 1, "keep", tmp_path)


def _own(tmp_path: Path, planted: bool) -> str:
    rng = random.Random(0)
    rows: list[dict[str, object]] = []
    for number in range(48):
        text = " ".join("".join(rng.choices("abcdefghij", k=4)) for _ in range(12))
        rows.append({"text": text, "label": number % 2, "split": SPLITS[number % 6 // 2]})
    if planted:
        rows[4]["text"] = rows[0]["text"]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_own_data_are_built_and_built_again_when_the_file_changes(tmp_path: Path) -> None:
    source, folder, rule = _own(tmp_path, planted=False), tmp_path / "out", load_rule("medical_advice")
    assert build(rule, source, SMALL, 0, "keep", folder)
    assert not build(rule, source, SMALL, 0, "keep", folder)
    with Path(source).open("a") as file:
        file.write(json.dumps({"text": "one more row that nobody has seen before", "label": 1, "split": "train"}) + "\n")
    assert build(rule, source, SMALL, 0, "keep", folder)


def test_a_planted_near_duplicate_stops_the_build_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="near duplicates across splits"):
        build(load_rule("medical_advice"), _own(tmp_path, planted=True), SMALL, 0, "keep", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["data.build", *arguments])
    command.main()


def test_the_command_writes_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--rule", "pii_leak", "--train", "16", "--validation", "8", "--test", "8", "--runs", str(tmp_path))
    _run(monkeypatch, *arguments)
    assert f"written to {tmp_path / 'data' / 'pii_leak'}" in capsys.readouterr().out
    _run(monkeypatch, *arguments)
    assert "unchanged in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rule", "pii_leek"), "Did you mean 'pii_leak'"),
        (("--rule", "all", "--data", "own.jsonl"), "--data is the data of one rule"),
        (("--rule", "pii_leak", "--data", "nowhere.csv"), "no such file"),
        (("--rule", "pii_leak", "--train", "7"), "multiple of 4"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        _run(monkeypatch, *arguments, "--runs", str(tmp_path))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
