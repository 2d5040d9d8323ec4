"""What is refused before anything is trained, and what a row holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from guard.conversation.example import Example, Message, read_examples, write_examples
from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from guard.recipe import load_recipe
from tests.train.conftest import RULE, TINY, write_toy_data
from train.examples import Rows, load

BUILDER = PromptBuilder.from_base(str(TINY))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_toy_data(tmp_path, n_train=8, n_other=4)
    return tmp_path


def loaded(folder: Path, max_fpr: float | None = None, **changed: object) -> Rows:
    recipe = load_recipe("tiny").model_copy(update={"context_tokens": 512} | changed)
    return load(folder, RULE.model_copy(update={"max_fpr": max_fpr}), recipe, BUILDER)


def rewrite(folder: Path, split: str, change: Callable[[list[Example]], list[Example]]) -> None:
    path = folder / f"{split}.jsonl"
    write_examples(path, change(read_examples(path)))


def test_rows_hold_the_prompt_that_the_builder_makes(folder: Path) -> None:
    rows = loaded(folder)
    example = read_examples(folder / "validation.jsonl")[1]
    row = rows.validation[1]
    assert (row.id, row.split, row.label) == (example.id, "validation", example.label)
    assert row.prompt == BUILDER.build(example.messages, RULE.title)
    without_rule = loaded(folder, rule_turn="none").validation[1]
    assert without_rule.prompt == BUILDER.build(example.messages, "")
    assert (len(rows.train), len(rows.validation), len(rows.test)) == (8, 4, 4)


def test_a_missing_split_is_named_with_the_command_that_makes_it(folder: Path) -> None:
    (folder / "validation.jsonl").unlink()
    with pytest.raises(GuardError, match=r"validation\.jsonl: no such file.*make data"):
        loaded(folder)


@pytest.mark.parametrize(
    ("kept", "found"), [((), "0 and 0"), ((0, 1, 2), "1 and 2"), ((0, 1, 3), "2 and 1")]
)
def test_a_split_of_one_class_stops(folder: Path, kept: tuple[int, ...], found: str) -> None:
    rewrite(folder, "validation", lambda rows: [rows[index] for index in kept])
    with pytest.raises(GuardError, match=rf"validation\.jsonl.*at least two.*got {found}"):
        loaded(folder)


def test_too_few_validation_rows_for_the_rate_are_refused(folder: Path) -> None:
    loaded(folder, max_fpr=0.5)  # of two allowed rows one
    with pytest.raises(GuardError, match=r"validation\.jsonl: too few.*2 rows.*at least 3 such"):
        loaded(folder, max_fpr=0.4)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rule": "other"}, r"another rule.*test-0 \(other\)"),
        ({"split": "train"}, r"another split.*test-0 \(train\)"),
        ({"id": "train-3"}, r"duplicate ids.*train-3"),
    ],
)
def test_foreign_and_repeated_examples(folder: Path, change: dict[str, Any], told: str) -> None:
    rewrite(folder, "test", lambda rows: [replace(rows[0], **change), *rows[1:]])
    with pytest.raises(GuardError, match=told):
        loaded(folder)


def test_every_prompt_beyond_the_context_is_named_and_counted(folder: Path) -> None:
    long = (Message("user", "refund " * 600),)
    rewrite(folder, "train", lambda rows: [replace(row, messages=long) for row in rows])
    told = r"context of 512 tokens.*train-0, train-1, train-2, train-3, train-4 and 3 more"
    with pytest.raises(GuardError, match=told):
        loaded(folder)


def test_a_prompt_and_its_verdict_may_fill_the_context_exactly(folder: Path) -> None:
    rows = loaded(folder)
    every_row = (*rows.train, *rows.validation, *rows.test)
    longest = max(len(row.prompt.token_ids) for row in every_row)
    loaded(folder, context_tokens=longest + 1)
    with pytest.raises(GuardError, match="do not fit"):
        loaded(folder, context_tokens=longest)
