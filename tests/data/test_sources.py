from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data.build import build
from data.generator.generate import Counts
from data.manifest import load
from data.rows import SourceRow
from data.sources import SOURCES, DataRequest, DataSource, labelled_rows, source_named
from guard.conversation.example import GENERATOR, SPLITS, Example, read_examples
from guard.errors import GuardError
from guard.layout import split_files
from guard.rule import load_rule
from tests.data.own_rows import in_splits, random_rows, written

RULE = load_rule("refund_promise")
SMALL = Counts(train=16, validation=8, test=8)


def _built(source: str, folder: Path) -> bool:
    return build(DataRequest(RULE, source, SMALL, 0, "keep", folder))


@pytest.mark.parametrize("name", ["lmm", "rows.txt", "hub", "sql:rows"])
def test_an_unknown_source_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(GuardError, match="there is no such data source") as refused:
        source_named(name)
    for source in SOURCES.values():
        assert source.shape in str(refused.value)
    assert ("Did you mean 'llm'" in str(refused.value)) == (name == "lmm")


def _numbered(name: str) -> Iterator[SourceRow]:
    """`numbered:N`: N rows of words that follow from their number, as a stranger's source."""
    for number in range(int(name.partition(":")[2])):
        start = f"{chr(97 + number // 26)}{chr(97 + number % 26)}"
        text = " ".join(start + letter for letter in "pqrstuvw")
        yield SourceRow(f"{name}:{number}", {"text": text, "label": number % 2})


def test_a_function_makes_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = DataSource("numbered:N", "N numbered rows", labelled_rows(_numbered))
    monkeypatch.setitem(SOURCES, "numbered:", row)
    assert _built("numbered:60", tmp_path)
    assert not _built("numbered:60", tmp_path)
    assert _built("numbered:80", tmp_path)
    assert load(tmp_path)["source"] == "numbered:80"
    assert read_examples(tmp_path / "test.jsonl")[0].id.startswith("numbered:80:")


def _both(tmp_path: Path, rows: list[dict[str, Any]]) -> list[Example]:
    """What is built of the rows beside generated ones, without the copies that have a long turn."""
    source = f"generator+{written(tmp_path / 'own.jsonl', rows)}"
    _built(source, tmp_path / "both")
    return _examples(tmp_path / "both")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    """What the generator writes alone."""
    folder = tmp_path_factory.mktemp("alone")
    _built(GENERATOR, folder)
    return _examples(folder)


def _examples(folder: Path) -> list[Example]:
    rows: list[Example] = []
    for file in split_files(folder):
        rows += [row for row in read_examples(file) if "long_turn" not in row.meta]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("splits", [(), ("train", "test")])
def test_own_rows_are_split_by_themselves_beside_generated_ones(
    tmp_path: Path, alone: list[Example], splits: tuple[str, ...]
) -> None:
    rows = random_rows(100)
    for number, row in enumerate(rows if splits else []):
        row |= {"split": splits[number // 80], "source": GENERATOR}  # whatever they say of it
    examples = _both(tmp_path, rows)
    own = [row for row in examples if not row.is_generated]
    assert [row for row in examples if row.is_generated] == alone
    assert Counter(row.split for row in own) == {"train": 50, "validation": 30, "test": 20}
    for split in SPLITS:
        assert {row.label for row in own if row.split == split} == {0, 1}
    source = f"generator+{tmp_path / 'own.jsonl'}"
    assert load(tmp_path / "both")["source"] == source
    assert not _built(source, tmp_path / "both")
    written(tmp_path / "own.jsonl", random_rows(60))
    assert _built(source, tmp_path / "both")


@pytest.mark.slow
def test_own_rows_that_are_generated_ones_are_refused(tmp_path: Path, alone: list[Example]) -> None:
    with pytest.raises(GuardError, match=r"none\.jsonl: no such file"):
        _built(f"generator+{tmp_path}/none.jsonl", tmp_path / "both")
    with pytest.raises(GuardError, match="no row with label 1"):
        _both(tmp_path, [row | {"label": 0} for row in random_rows()])
    copied = alone[0]
    turns = [{"role": turn.role, "content": turn.content} for turn in copied.messages]
    copies = [
        {"messages": turns, "label": 1 - copied.label, "id": "mine", "split": "train"},
        {"text": "of an id that is taken", "label": 0, "id": copied.id, "split": "train"},
        {"text": "of their group", "label": 0, "group": copied.group, "id": "o", "split": "train"},
    ]
    with pytest.raises(GuardError, match="some of your rows are generated ones") as refused:
        _both(tmp_path, [*in_splits(random_rows()), *copies])
    for name in ("mine (like ", f"{copied.id} (the id or group", "o (the id or group"):
        assert name in str(refused.value)
    assert not (tmp_path / "both").exists()
