"""A stranger's source: a function that reads rows, and a row in SOURCES."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from data.build import build
from data.manifest import load
from data.rows import SourceRow
from data.source import DataSource, labelled_rows, no_files
from data.sources import SOURCES
from guard.conversation.example import read_examples
from guard.errors import GuardError
from guard.rule import load_rule


def _numbered(name: str) -> Iterator[SourceRow]:
    """`numbered:N`: N rows of words that follow from their number."""
    for number in range(int(name.partition(":")[2])):
        words = [
            f"{chr(97 + number // 26)}{chr(97 + number % 26)}{letter}" for letter in "pqrstuvw"
        ]
        yield SourceRow(f"{name}:{number}", {"text": " ".join(words), "label": number % 2})


def test_a_function_and_a_row_make_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = DataSource("numbered:N", "N numbered rows", labelled_rows(_numbered), no_files)
    monkeypatch.setitem(SOURCES, "numbered:", row)
    rule = load_rule("medical_advice")
    assert build(rule, "numbered:60", None, 0, "keep", tmp_path)
    assert not build(rule, "numbered:60", None, 0, "keep", tmp_path)
    assert build(rule, "numbered:80", None, 0, "keep", tmp_path)
    assert load(tmp_path)["source"] == "numbered:80"
    assert read_examples(tmp_path / "test.jsonl")[0].id.startswith("numbered:80:")


def test_a_source_that_names_a_file_which_is_not_there_is_an_error_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone.jsonl"
    row = DataSource("numbered:N", "N rows", labelled_rows(_numbered), lambda _: [gone])
    monkeypatch.setitem(SOURCES, "numbered:", row)
    with pytest.raises(GuardError, match=rf"{gone}: no such file.*numbered:N in SOURCES"):
        build(load_rule("medical_advice"), "numbered:60", None, 0, "keep", tmp_path / "out")
