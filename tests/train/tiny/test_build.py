"""`make base` on a corpus of two conversations and one step."""

import json
import sys
from pathlib import Path

import pytest

from tests.train.tiny.conftest import SHAPES
from train.tiny import build
from train.tiny.lessons.lesson import Lessons

pytestmark = pytest.mark.slow


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    texts = ("good morning, where is the train to the sea?", "it leaves at noon from the north.")
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant"), texts, strict=True)
    ]
    file = tmp_path / "talk.jsonl"
    file.write_text((json.dumps({"messages": messages, "license": "MIT"}) + "\n") * 2)
    return file


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["build", *map(str, arguments)])
    build.main()


def test_a_base_is_built_and_built_again_without_training(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_student: None
) -> None:
    monkeypatch.setitem(Lessons.__init__.__kwdefaults__, "shapes", SHAPES)
    out, work = tmp_path / "base", tmp_path / "work"
    options = ("--corpus", corpus, "--rules", "none", "--steps", 1, "--vocabulary", 1500)
    places = ("--out", out, "--work", work)
    run(monkeypatch, *options, *places, "--note", "A trial")
    provenance = json.loads((out / "provenance.json").read_text())
    assert (provenance["steps"], provenance["rules"]) == (1, [])
    assert provenance["notes"] == ["A trial"]
    assert provenance["corpora"][0]["licences"] == ["MIT"]
    run(monkeypatch, *options, *places)
    again = json.loads((out / "provenance.json").read_text())
    assert again["weights_sha256"] == provenance["weights_sha256"]


def test_the_base_it_goes_on_from_is_never_written_over(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--corpus", corpus, "--base", tmp_path, "--out", tmp_path)
    assert "would take the place of the one it goes on from" in capsys.readouterr().err


def test_without_a_corpus_the_command_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(monkeypatch)
    assert exit_.value.code == 2
    assert "no corpus given. Run `make base CORPUS=" in capsys.readouterr().err


def test_rules_are_those_with_a_phrase_book() -> None:
    assert build.rules_with_books("none") == []
    assert build.rules_with_books("toxicity,pii_leak") == ["toxicity", "pii_leak"]
    assert "medical_advice" in build.rules_with_books("all")
