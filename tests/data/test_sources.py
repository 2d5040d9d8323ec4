from pathlib import Path

import pytest

from data.mixed import GENERATOR_AND
from data.rows import HUB
from data.source import no_files
from data.sources import FILE, LLM, SOURCES, source_named
from guard.conversation.example import GENERATOR
from guard.errors import GuardError


def test_a_source_is_named_by_its_key_by_its_prefix_or_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    names = {
        "generator": GENERATOR,
        "llm": LLM,
        "hub:some/set:english": HUB,
        "generator+rows.jsonl": GENERATOR_AND,
        "generator+hub:some/set": GENERATOR_AND,
        "rows.jsonl": FILE,
        "../there/rows.csv.gz": FILE,
        str(tmp_path / "folder"): FILE,
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
