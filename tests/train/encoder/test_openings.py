"""A rule learns of the turns of those whom it does not judge that they are allowed."""

from __future__ import annotations

import pytest

from guard.conversation.example import SPLITS, Message
from guard.prompt.encoder import EncoderPromptBuilder
from tests.train.conftest import MakeEncoderJob, mostly_generated
from train.encoder.openings import ADAPTER_EVERY, with_openings
from train.examples import Row, Rows
from train.job import Job
from train.methods import TRAINERS

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


def test_openings_of_some_rows_are_allowed_rows(make_encoder_job: MakeEncoderJob) -> None:
    job = make_encoder_job(judged="assistant")
    rows = rows_of(job)
    trained_on = with_openings(job, rows, ADAPTER_EVERY)
    added = trained_on.train[len(rows.train) :]
    assert trained_on.train[: len(rows.train)] == rows.train
    assert (trained_on.validation, trained_on.test) == (rows.validation, rows.test)
    assert len(added) == len(rows.train) // ADAPTER_EVERY
    opening = job.builder.build([ASKED], "")
    assert all((one.label, one.prompt) == (0, opening) for one in added)
    assert added[0].id == "train-0/opening"


def test_generated_rows_and_others_bring_openings_alike(make_encoder_job: MakeEncoderJob) -> None:
    """However few the others are, their first row has one."""
    job = make_encoder_job(judged="assistant")
    mixed = mostly_generated(rows_of(job), own_training=2, own_validation=0)
    added = with_openings(job, mixed, 20).train[len(mixed.train) :]
    assert [one.is_generated for one in added] == [True, True, False]


@pytest.mark.parametrize("judged", ["user", "conversation"])
def test_judged_beginnings_have_no_openings(make_encoder_job: MakeEncoderJob, judged: str) -> None:
    job = make_encoder_job(judged=judged)
    rows = rows_of(job)
    assert with_openings(job, rows, ADAPTER_EVERY) == rows


def test_without_a_judged_speaker_there_is_no_opening(make_encoder_job: MakeEncoderJob) -> None:
    job = make_encoder_job(judged="tool")
    builder = job.builder
    assert isinstance(builder, EncoderPromptBuilder)
    assert builder.opening(builder.prefix_ids([ASKED, TOLD]), "tool") == []
    document = Message("tool", "a dose")
    told = builder.prefix_ids([ASKED, document, TOLD])
    assert builder.opening(told, "tool") == builder.prefix_ids([ASKED])
    assert builder.opening(told, "assistant") == builder.prefix_ids([ASKED, document])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["head", "lora"])
def test_the_other_speaker_alone_is_allowed(make_encoder_job: MakeEncoderJob, method: str) -> None:
    job = make_encoder_job(method, judged="assistant")
    (trained,) = TRAINERS["encoder"][method].fit([(job, rows_of(job))])
    assert not isinstance(trained, Exception), trained
    talks = ([ASKED], [ASKED, TOLD], [ASKED, ANSWERED])
    asked, told, answered = trained.logits([job.builder.build(talk, "") for talk in talks])
    assert asked < 0 < told and answered < 0
