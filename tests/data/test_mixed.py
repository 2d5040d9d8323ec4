"""A few rows of one's own beside generated ones."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from data.build import build
from data.generator.generate import Counts
from data.manifest import load
from data.sources import source_named
from guard.conversation.example import GENERATOR, SPLITS, Example, read_examples
from guard.errors import GuardError
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
    """The rows, without the copies that have a long turn."""
    rows: list[Example] = []
    for file in split_files(folder):
        rows += [row for row in read_examples(file) if "long_turn" not in row.meta]
    return rows


def test_own_rows_are_split_by_themselves_and_stand_beside_those_of_the_generator_alone(
    tmp_path: Path,
) -> None:
    source = f"generator+{_own(tmp_path, rows=100)}"
    assert build(RULE, source, SMALL, 0, "keep", tmp_path / "both")
    assert build(RULE, GENERATOR, SMALL, 0, "keep", tmp_path / "alone")
    rows = _examples(tmp_path / "both")
    generated = [row for row in rows if row.is_generated]
    own = [row for row in rows if not row.is_generated]
    assert generated == _examples(tmp_path / "alone")
    assert Counter(row.split for row in own) == {"train": 50, "validation": 30, "test": 20}
    for split in SPLITS:
        assert {row.label for row in own if row.split == split} == {0, 1}
    assert {row.source for row in own} == {str(tmp_path / "own.jsonl")}
    assert load(tmp_path / "both")["source"] == source


def test_the_data_are_written_again_when_the_own_rows_change_and_depend_on_the_phrases_too(
    tmp_path: Path,
) -> None:
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


def test_an_own_row_that_copies_a_generated_one_is_refused_whatever_its_split_and_label(
    tmp_path: Path,
) -> None:
    assert build(RULE, GENERATOR, SMALL, 0, "keep", tmp_path / "alone")
    copied = read_examples(tmp_path / "alone" / "train.jsonl")[0]
    turns = [{"role": turn.role, "content": turn.content} for turn in copied.messages]
    row = {"messages": turns, "label": 1 - copied.label, "id": "mine", "split": "train"}
    named = {"text": "of an id that is taken", "label": 0, "id": copied.id, "split": "train"}
    in_its_group = {"text": "of a group of theirs", "label": 0, "group": copied.group}
    for own, name in ((row, "mine"), (named, copied.id), (in_its_group | {"id": "other"}, "other")):
        path = _own(tmp_path)
        rows: list[dict[str, object]] = []
        for number, line in enumerate(path.read_text().splitlines()):
            rows.append(json.loads(line) | {"split": SPLITS[number // 2 % 3]})
        rows.append({"split": "train"} | own)
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        with pytest.raises(GuardError, match=f"some of your rows are generated ones.*{name} \\("):
            build(RULE, f"generator+{path}", SMALL, 0, "keep", tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_what_an_own_row_says_of_its_source_does_not_make_it_a_generated_one(
    tmp_path: Path,
) -> None:
    path = _own(tmp_path)
    lines = [json.loads(line) | {"source": GENERATOR} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert build(RULE, f"generator+{path}", SMALL, 0, "keep", tmp_path / "both")
    rows = _examples(tmp_path / "both")
    assert {row.source for row in rows} == {GENERATOR}
    assert Counter(row.is_generated for row in rows) == {True: 32, False: 50}


def test_own_rows_without_a_validation_split_get_one_of_their_training_rows(tmp_path: Path) -> None:
    path = _own(tmp_path, rows=100)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["split"] = "train" if number < 80 else "test"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert build(RULE, f"generator+{path}", SMALL, 0, "keep", tmp_path / "both")
    own = [row for row in _examples(tmp_path / "both") if not row.is_generated]
    assert Counter(row.split for row in own) == {"train": 50, "validation": 30, "test": 20}
