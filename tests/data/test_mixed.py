"""A few rows of one's own beside generated ones."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from data.build import build, source_named
from data.generator.generate import Counts
from data.manifest import load
from guard.errors import GuardError
from guard.example import GENERATOR, SPLITS, Example, read_examples
from guard.layout import split_files
from guard.rule import load_rule

pytestmark = pytest.mark.slow

RULE = load_rule("refund_promise")
SMALL = Counts(train=16, validation=8, test=8)


def _own(folder: Path, rows: int = 50, label: int | None = None) -> Path:
    rng = random.Random(0)
    path = folder / "own.jsonl"
    lines: list[str] = []
    for number in range(rows):
        text = " ".join("".join(rng.choices("abcdefghij", k=4)) for _ in range(12))
        lines.append(json.dumps({"text": text, "label": number % 2 if label is None else label}))
    path.write_text("\n".join(lines) + "\n")
    return path


def _examples(folder: Path) -> list[Example]:
    rows: list[Example] = []
    for file in split_files(folder):
        rows += read_examples(file)
    return rows


def test_own_rows_are_split_by_themselves_and_stand_beside_those_of_the_generator_alone(
    tmp_path: Path,
) -> None:
    source = f"generator+{_own(tmp_path)}"
    assert build(RULE, source, SMALL, 0, "keep", tmp_path / "both")
    assert build(RULE, GENERATOR, SMALL, 0, "keep", tmp_path / "alone")
    rows = _examples(tmp_path / "both")
    generated = [row for row in rows if row.source == GENERATOR]
    own = [row for row in rows if row.source != GENERATOR]
    assert generated == _examples(tmp_path / "alone")
    assert Counter(row.split for row in own) == {"train": 30, "validation": 10, "test": 10}
    for split in SPLITS:
        assert {row.label for row in own if row.split == split} == {0, 1}
    assert {row.source for row in own} == {str(tmp_path / "own.jsonl")}
    assert load(tmp_path / "both")["source"] == source


def test_the_data_are_written_again_when_the_own_rows_or_the_phrases_change(tmp_path: Path) -> None:
    own = _own(tmp_path)
    source, folder = f"generator+{own}", tmp_path / "both"
    assert build(RULE, source, SMALL, 0, "keep", folder)
    assert not build(RULE, source, SMALL, 0, "keep", folder)
    _own(tmp_path, rows=60)
    assert build(RULE, source, SMALL, 0, "keep", folder)
    files = source_named(source).files(source)
    assert own in files and set(source_named(GENERATOR).files(GENERATOR)) < set(files)


def test_own_rows_that_are_missing_or_of_one_label_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(GuardError, match=r"none\.jsonl: no such file"):
        build(RULE, f"generator+{tmp_path}/none.jsonl", SMALL, 0, "keep", tmp_path / "both")
    with pytest.raises(GuardError, match="no row with label 1"):
        build(RULE, f"generator+{_own(tmp_path, label=0)}", SMALL, 0, "keep", tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_an_own_row_that_copies_a_generated_one_of_another_split_is_refused(tmp_path: Path) -> None:
    assert build(RULE, GENERATOR, SMALL, 0, "keep", tmp_path / "alone")
    own = _own(tmp_path)
    lines = own.read_text().splitlines()
    for split in SPLITS:
        copied = read_examples(tmp_path / "alone" / f"{split}.jsonl")[0]
        turns = [{"role": turn.role, "content": turn.content} for turn in copied.messages]
        lines.append(json.dumps({"messages": turns, "label": copied.label}))
    own.write_text("\n".join(lines) + "\n")
    with pytest.raises(GuardError, match="near duplicates across splits"):
        for seed in range(5):
            build(RULE, f"generator+{own}", SMALL, seed, "keep", tmp_path / "both")
