"""Another threshold without training: the card changes, the weights do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from guard.conversation.example import GENERATOR, read_examples, write_examples
from guard.errors import GuardError
from guard.rule import Rule
from guard.weights.card import Card, load_card
from guard.weights.predictions import write_predictions
from tests.train.conftest import MakeJob, data
from tests.train.encoder.conftest import (
    MakeEncoderJob,
    make_encoder_job,  # noqa: F401 - a fixture
    toy_encoder,  # noqa: F401 - a fixture
)
from tests.train.test_export import exported
from train import run
from train.calibration.recalibrate import recalibrate
from train.encoder.trained import TrainedEncoder
from train.encoder.trainer import fit
from train.job import Job

pytestmark = pytest.mark.slow


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    job = make_job(max_steps=1)
    exported(job)
    rows = read_examples(job.data / "validation.jsonl")
    violating, allowed = ([row for row in rows if row.label == label] for label in (1, 0))
    logits = [("v", row, 1.0 + place) for place, row in enumerate(violating)] + [
        ("a", row, place - 3.0) for place, row in enumerate(allowed)
    ]
    write_predictions(job.folder, [(row.id, "validation", logit) for _, row, logit in logits])
    return job


def at(job: Job, max_fpr: float | None) -> Job:
    rule: Rule = job.rule.model_copy(update={"max_fpr": max_fpr})
    return replace(job, rule=rule)


def flagged(job: Job, card: Card) -> float:
    """The share of allowed validation rows at or above the card's threshold."""
    allowed = [row for row in read_examples(job.data / "validation.jsonl") if row.label == 0]
    return sum(
        card.calibration.verdict("", place - 3.0).violates for place in range(len(allowed))
    ) / len(allowed)


def test_a_stated_rate_moves_the_threshold_and_nothing_else(job: Job) -> None:
    before = load_card(job.folder)
    recalibrate(at(job, 0.25))
    after = load_card(job.folder)
    assert after.max_fpr == 0.25 and 0 < flagged(job, after) <= 0.25
    assert after.metrics["validation"]["n"] == len(read_examples(job.data / "validation.jsonl"))
    kept = set(Card.model_fields) - {
        "temperature",
        "bias",
        "threshold",
        "uncertainty_band",
        "max_fpr",
        "metrics",
    }
    assert after.model_dump(include=kept) == before.model_dump(include=kept)
    recalibrate(job)
    assert load_card(job.folder).max_fpr is None


def test_a_run_chooses_the_threshold_anew_and_trains_nothing(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.outdated_jobs([at(job, 0.25)], force=False) == ([], [])
    assert "chosen anew, for at most 25 % false positives" in capsys.readouterr().out
    assert load_card(job.folder).max_fpr == 0.25
    assert run.outdated_jobs([at(job, 0.25)], force=False) == ([], [])
    assert capsys.readouterr().out == f"{job.name}: up to date\n"


def test_weights_whose_threshold_cannot_be_chosen_anew_leave_other_jobs_of_the_rule_alone(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    (job.folder / "predictions.jsonl").unlink()
    stale, outdated = at(job, 0.25), replace(at(job, 0.25), seed=7)
    work, failed = run.outdated_jobs([stale, outdated], force=False)
    assert ([job for job, _ in work], failed) == ([outdated], [stale.name])
    assert f"{stale.name}: " in capsys.readouterr().out


def test_missing_predictions_are_an_error_and_the_card_stays(job: Job) -> None:
    before = (job.folder / "card.json").read_bytes()
    write_predictions(job.folder, [])
    with pytest.raises(GuardError, match=r"no prediction for .* validation rows.*METHOD=.*FORCE=1"):
        recalibrate(at(job, 0.25))
    Path(job.folder / "predictions.jsonl").unlink()
    with pytest.raises(GuardError, match="no such file"):
        recalibrate(at(job, 0.25))
    assert (job.folder / "card.json").read_bytes() == before


def test_a_rate_that_the_validation_rows_are_too_few_for_names_their_file(job: Job) -> None:
    with pytest.raises(GuardError, match=r"validation\.jsonl: too few allowed.*max_fpr 0\.001"):
        recalibrate(at(job, 0.001))


def test_a_rate_by_which_an_adapter_s_head_would_be_another_trains_it_again(
    make_encoder_job: MakeEncoderJob,  # noqa: F811
) -> None:
    """Of the own rows eight are allowed: enough for a balanced threshold, too few for one in 20."""
    job = make_encoder_job()
    mark_first_rows_as_generated(job, 16)
    (trained,) = fit([(job, data(job))])
    assert isinstance(trained, TrainedEncoder), trained
    run.finish(job, data(job), trained)
    assert recalibrate(at(job, 0.25)) == 16
    with pytest.raises(GuardError, match=r"selects other validation rows.*before 0\.25"):
        recalibrate(at(job, 0.05))


def mark_first_rows_as_generated(job: Job, count: int) -> None:
    for split in ("train", "validation"):
        file = job.data / f"{split}.jsonl"
        rows = read_examples(file)
        generated = [replace(row, source=GENERATOR) for row in rows[:count]]
        write_examples(file, [*generated, *rows[count:]])
