"""A stranger's source: a function that reads rows, and a row in SOURCES."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import data.build as command
from data.build import build
from data.manifest import load
from data.mixed import GENERATOR_AND
from data.rows import HUB, SourceRow
from data.source import DataSource, labelled_rows, no_files
from data.sources import LLM, SOURCES, source_named
from guard.errors import GuardError
from guard.example import GENERATOR, read_examples
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


def test_a_source_is_named_by_its_key_by_its_prefix_or_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    names = {
        "generator": GENERATOR,
        "llm": LLM,
        "hub:some/set:english": HUB,
        "generator+rows.jsonl": GENERATOR_AND,
        "generator+hub:some/set": GENERATOR_AND,
        "rows.jsonl": command.FILE,
        "../there/rows.csv.gz": command.FILE,
        str(tmp_path / "folder"): command.FILE,
    }
    for name, key in names.items():
        assert source_named(name) is SOURCES[key], name


@pytest.mark.parametrize("name", ["lmm", "rows.txt", "hub", "sql:rows"])
def test_an_unknown_source_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(GuardError, match="there is no such data source") as refused:
        source_named(name)
    for source in SOURCES.values():
        assert source.shape in str(refused.value)
    assert ("Did you mean 'llm'" in str(refused.value)) == (name == "lmm")


def test_only_what_is_read_from_files_here_depends_on_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    assert source_named(str(path)).files(str(path)) == [path]
    assert source_named("hub:some/set").files("hub:some/set") == []
    assert source_named("llm").files is no_files
    names = {file.name for file in source_named("generator").files("generator")}
    assert {"background.yaml", "medical_advice.yaml"} <= names
