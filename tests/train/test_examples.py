"""What is refused before anything is trained, and what a row holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytest import CaptureFixture

from guard.conversation.example import (
    GENERATOR,
    SPLITS,
    Example,
    Message,
    read_examples,
    write_examples,
)
from guard.errors import GuardError
from guard.layout import Runs
from guard.prompt.decoder import PromptBuilder
from guard.recipe import load_recipe
from tests.train import conftest as toys
from train.examples import ADAPTER_EVERY, Row, Rows, load, with_openings
from train.job import Job
from train.methods import TRAINERS

BUILDER = PromptBuilder.from_base(str(toys.TINY))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = Runs(tmp_path).data(toys.RULE.id)
    toys.write_toy_data(folder, n_train=8, n_other=4)
    return folder


def loaded(folder: Path, max_fpr: float | None = None, **changed: object) -> Rows:
    stated = {"context_tokens": 512, "rule_turn": "title"} | changed
    recipe = load_recipe("tiny").model_copy(update=stated)
    rule = toys.RULE.model_copy(update={"max_fpr": max_fpr})
    return load(Job(rule, recipe, "alora", 0, BUILDER, Runs(folder.parents[1])))


def rewrite(folder: Path, split: str, change: Callable[[list[Example]], list[Example]]) -> None:
    path = folder / f"{split}.jsonl"
    write_examples(path, change(read_examples(path)))


def test_rows_hold_the_prompt_that_the_builder_makes(folder: Path) -> None:
    rows = loaded(folder)
    example = read_examples(folder / "validation.jsonl")[1]
    row = rows.validation[1]
    assert (row.id, row.split, row.label) == (example.id, "validation", example.label)
    assert row.prompt == BUILDER.build(example.messages, toys.RULE.title)
    without_rule = loaded(folder, rule_turn="none").validation[1]
    assert without_rule.prompt == BUILDER.build(example.messages, "")
    assert (len(rows.train), len(rows.validation), len(rows.test)) == (8, 4, 4)


@pytest.mark.parametrize(
    ("kept", "found"), [((), "0 and 0"), ((0, 1, 2), "1 and 2"), ((0, 1, 3), "2 and 1")]
)
def test_a_split_of_one_class_stops(folder: Path, kept: tuple[int, ...], found: str) -> None:
    rewrite(folder, "validation", lambda rows: [rows[index] for index in kept])
    with pytest.raises(GuardError, match=rf"validation\.jsonl.*at least two.*got {found}"):
        loaded(folder)


def test_too_few_validation_rows_for_the_rate_are_refused(folder: Path) -> None:
    loaded(folder, max_fpr=0.5)  # of two allowed rows one
    with pytest.raises(GuardError, match=r"validation\.jsonl: too few.*2 rows.*at least 3"):
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
    told = r"511 tokens exceed the context.*train-0, train-1, train-2, train-3, train-4 and 3 more"
    with pytest.raises(GuardError, match=told):
        loaded(folder)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_long_training_rows_of_the_generator_alone_are_left_out(
    folder: Path, capsys: CaptureFixture[str], split: str
) -> None:
    long = (Message("user", "refund " * 600),)

    def with_long(rows: list[Example]) -> list[Example]:
        return [replace(rows[0], messages=long, source=GENERATOR), *rows[1:]]

    rewrite(folder, split, with_long)
    if split == "train":
        assert [row.id for row in loaded(folder).train] == [f"train-{n}" for n in range(1, 8)]
        assert "generated rows of over 511 tokens left out: 1" in capsys.readouterr().out
    else:
        with pytest.raises(GuardError, match=r"exceed the context.*validation-0"):
            loaded(folder)


def test_a_prompt_and_its_verdict_may_fill_the_context_exactly(folder: Path) -> None:
    rows = loaded(folder)
    loaded(folder, context_tokens=longest_of(rows) + 1)
    with pytest.raises(GuardError, match="exceed the context"):
        loaded(folder, context_tokens=longest_of(rows))


def test_a_conversation_may_fill_an_encoder_s_context(
    make_encoder_job: toys.MakeEncoderJob,
) -> None:
    """No verdict is generated behind it, and the server judges as long a one."""
    job = make_encoder_job()
    longest = longest_of(toys.data(job))
    assert toys.data(toys.with_recipe(job, context_tokens=longest)) == toys.data(job)
    with pytest.raises(GuardError, match="exceed the context"):
        toys.data(toys.with_recipe(job, context_tokens=longest - 1))


def longest_of(rows: Rows) -> int:
    return max(len(row.prompt.token_ids) for row in (*rows.train, *rows.validation, *rows.test))


ASKED = Message("user", "aspirin ibuprofen dose")
ANSWERED = Message("assistant", "the train leaves at noon")
TOLD = Message("assistant", "take a dose of aspirin")


def rows_of(job: Job) -> Rows:
    """The user's turn is the same whatever the assistant answers."""
    splits: list[tuple[Row, ...]] = []
    for split in SPLITS:
        of_split = []
        for number in range(24):
            label = 1 - number % 2
            prompt = job.builder.build([ASKED, TOLD if label else ANSWERED], "")
            of_split.append(Row(f"{split}-{number}", split, label, prompt))
        splits.append(tuple(of_split))
    return Rows(*splits)


def test_openings_of_some_rows_are_allowed_rows(make_encoder_job: toys.MakeEncoderJob) -> None:
    job = make_encoder_job(judged="assistant")
    rows = rows_of(job)
    trained_on = with_openings(job, rows, ADAPTER_EVERY)
    added = trained_on.train[len(rows.train) :]
    assert trained_on.train[: len(rows.train)] == rows.train
    assert (trained_on.validation, trained_on.test) == (rows.validation, rows.test)
    assert len(added) == len(rows.train) // ADAPTER_EVERY
    opening = job.builder.build([ASKED], "")
    assert all((row.label, row.prompt) == (0, opening) for row in added)
    assert added[0].id == "train-0/opening"
    # Generated rows and own rows bring openings alike: the first of however few has one.
    mixed = toys.mostly_generated(rows, own_training=2, own_validation=0)
    added = with_openings(job, mixed, 20).train[len(mixed.train) :]
    assert [row.is_generated for row in added] == [True, True, False]
    for judged in ("user", "conversation", "tool"):  # who speaks first, or does not speak
        assert with_openings(make_encoder_job(judged=judged), rows, ADAPTER_EVERY) == rows


@pytest.mark.slow
@pytest.mark.parametrize("method", ["head", "lora"])
def test_the_other_speaker_alone_is_allowed(
    make_encoder_job: toys.MakeEncoderJob, method: str
) -> None:
    job = make_encoder_job(method, judged="assistant")
    (trained,) = TRAINERS["encoder"][method].fit([(job, rows_of(job))])
    assert not isinstance(trained, Exception), trained
    talks = ([ASKED], [ASKED, TOLD], [ASKED, ANSWERED])
    asked, told, answered = trained.logits([job.builder.build(talk, "") for talk in talks])
    assert asked < 0 < told and answered < 0
