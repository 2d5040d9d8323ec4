"""Another threshold without training: the card changes, the weights do not."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytest import CaptureFixture, MonkeyPatch

from guard.conversation.example import read_examples, write_examples
from guard.errors import GuardError
from guard.method import HEAD
from guard.twins import TwinRate
from guard.weights.card import Card, load_card, read_card
from guard.weights.predictions import read_predictions, write_predictions
from tests.train import conftest as toys
from train import calibrate, run
from train.calibrate import calibrate_rules, recalibrate
from train.job import Job
from train.run import finish

ALLOWED = [place - 3.0 for place in range(16)]  # the logits of allowed rows of either split


@pytest.fixture
def job(make_job: toys.MakeJob, monkeypatch: MonkeyPatch) -> Job:
    """Weights whose violating rows have logits from 1 up, and allowed ones from -3."""
    job = make_job()
    toys.finish_at_once(job)
    logits = []
    for split in ("validation", "test"):
        places = [0, 0]
        for row in read_examples(job.data / f"{split}.jsonl"):
            logits.append((row.id, split, places[row.label] + (1.0 if row.label else -3.0)))
            places[row.label] += 1
    write_predictions(job.folder, logits)
    monkeypatch.setattr(calibrate, "load_rule", lambda name: job.rule)
    monkeypatch.setattr(calibrate, "rule_names", lambda selection: [selection])
    return job


def chosen(job: Job, **choice: float) -> None:
    calibrate_rules(job.rule.id, job.recipe, [job.method], job.runs, **choice)


def flagged(card: Card) -> int:
    """The allowed rows of a split at or above the card's threshold."""
    return sum(card.calibration.verdict("", logit).violates for logit in ALLOWED)


def test_another_rate_in_the_rule_moves_the_threshold_and_nothing_else(
    job: Job, capsys: CaptureFixture[str]
) -> None:
    before = load_card(job.folder)
    assert run.outdated_jobs([toys.with_rule(job, max_fpr=0.25)], force=False) == ([], [])
    assert "chosen anew, for at most 25 % false positives" in capsys.readouterr().out
    assert run.outdated_jobs([toys.with_rule(job, max_fpr=0.25)], force=False) == ([], [])
    assert capsys.readouterr().out == f"{job.name}: up to date\n"
    after = load_card(job.folder)
    assert after.max_fpr == 0.25 and 0 < flagged(after) <= 0.25 * len(ALLOWED)
    assert after.metrics["validation"]["n"] == 32
    changed = {"temperature", "bias", "threshold", "uncertainty_band", "max_fpr", "metrics"}
    kept = set(Card.model_fields) - changed
    assert after.model_dump(include=kept) == before.model_dump(include=kept)
    recalibrate(job)
    assert load_card(job.folder).max_fpr is None
    with pytest.raises(GuardError, match=r"validation\.jsonl: too few allowed.*max_fpr 0\.001"):
        recalibrate(toys.with_rule(job, max_fpr=0.001))


def test_missing_predictions_are_an_error(job: Job, capsys: CaptureFixture[str]) -> None:
    before = (job.folder / "card.json").read_bytes()
    write_predictions(job.folder, [])
    with pytest.raises(GuardError, match=r"no prediction for .* validation rows.*METHOD=.*FORCE=1"):
        recalibrate(toys.with_rule(job, max_fpr=0.25))
    Path(job.folder / "predictions.jsonl").unlink()
    with pytest.raises(GuardError, match="no such file"):
        recalibrate(toys.with_rule(job, max_fpr=0.25))
    stale, outdated = (
        toys.with_rule(job, max_fpr=0.25),
        replace(toys.with_rule(job, max_fpr=0.25), seed=7),
    )
    work, failed = run.outdated_jobs([stale, outdated], force=False)
    assert ([job for job, _ in work], failed) == ([outdated], [stale.name])
    assert f"{stale.name}: " in capsys.readouterr().out
    assert (job.folder / "card.json").read_bytes() == before


@pytest.mark.parametrize("kind", ["lora", "head", "alora with a head", "encoder"])
def test_own_rows_calibrate_and_a_rate_that_takes_others_too_is_no_head_s(
    make_encoder_job: toys.MakeEncoderJob, make_job: toys.MakeJob, kind: str
) -> None:
    """Eight of the own rows are allowed: enough for a balanced threshold, too few for one in 14."""
    job = make_job("lora")
    if kind == "encoder":
        job = make_encoder_job()
    toys.with_own_rows(job, 16)
    rows = toys.data(job)
    metrics = finish(job, rows, toys.RankedWeights(rows))["validation"]
    assert (metrics["n"], metrics["accuracy"]) == (16, 1.0)
    assert len(read_predictions(job.folder, "validation", "")) == 32
    if kind == "head":
        head = replace(job, method="head")
        job.folder.rename(head.folder)
        job = head
    card = read_card(job.folder)
    if kind == "alora with a head":
        card = card.model_copy(update={"files": card.files | {HEAD: "a head's digest"}})
        card.save(job.folder)
    for max_fpr in (0.25, None):
        assert recalibrate(toys.with_rule(job, max_fpr=max_fpr)) == 16
        assert read_card(job.folder).metrics["validation"]["n"] == 16
    if kind == "lora":
        assert recalibrate(toys.with_rule(job, max_fpr=0.07)) == 32
        return
    with pytest.raises(GuardError, match=r"selects other validation rows.*0\.07.*FORCE=1"):
        recalibrate(toys.with_rule(job, max_fpr=0.07))
    assert read_card(job.folder).calibration == card.calibration


def test_a_stated_threshold_is_taken(job: Job, capsys: CaptureFixture[str]) -> None:
    before = load_card(job.folder)
    chosen(job, threshold=0.9)
    after = load_card(job.folder)
    assert (after.threshold, after.threshold_by, after.max_fpr) == (0.9, "threshold", None)
    assert after.version != before.version and after.files == before.files
    assert after.uncertainty_band[0] <= 0.9 <= after.uncertainty_band[1]
    printed = capsys.readouterr().out
    assert f"-> 0.900, as stated; version {before.version[:12]} -> {after.version[:12]}" in printed
    last = printed.splitlines()[-1]
    assert last.strip().startswith("after") and f"({flagged(after)} of {len(ALLOWED)})" in last


def test_later_trainings_keep_a_stated_rate(job: Job, capsys: CaptureFixture[str]) -> None:
    chosen(job, max_fpr=0.25)
    asked = load_card(job.folder)
    assert (asked.threshold_by, asked.max_fpr) == ("max_fpr", 0.25)
    assert "for at most 25 % false positives, as asked" in capsys.readouterr().out
    assert run.outdated_jobs([job], force=False) == ([], [])
    assert "as `make calibrate` was told" in capsys.readouterr().out
    assert load_card(job.folder) == asked
    chosen(job)
    by_rule = load_card(job.folder)
    assert (by_rule.threshold_by, by_rule.max_fpr) == ("rule", None)
    assert "balanced, by the rule's file" in capsys.readouterr().out


def test_missing_or_foreign_weights_are_refused(job: Job, monkeypatch: MonkeyPatch) -> None:
    other = replace(job, rule=job.rule.model_copy(update={"id": "other"}))
    shutil.copytree(job.folder, other.folder)
    shutil.copytree(job.data, other.data)
    shutil.rmtree(job.folder)
    with pytest.raises(GuardError, match=f"no weights to calibrate.*make train RULE={job.rule.id}"):
        chosen(job)
    monkeypatch.setattr(calibrate, "load_rule", lambda name: other.rule)
    with pytest.raises(GuardError, match="not of the rule 'other'"):
        chosen(other, threshold=0.9)


@pytest.mark.parametrize("stated", ["--max-fpr=2", "--threshold=x", "--max-fpr=nan"])
def test_bad_options_are_named(stated: str, monkeypatch: MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["calibrate", "--rule", "toxicity", stated])
    with pytest.raises(SystemExit) as ended:
        calibrate.main()
    assert ended.value.code == 2 and "between 0 and 1" in capsys.readouterr().err


def mark_twins(job: Job, split: str, twins: int) -> None:
    """The first so many allowed rows say that they are twins."""
    rows = read_examples(job.data / f"{split}.jsonl")
    allowed = [row.id for row in rows if not row.label][:twins]
    marked = [replace(row, twin=row.id in allowed) for row in rows]
    write_examples(job.data / f"{split}.jsonl", marked)


def test_a_rate_of_twins_moves_the_threshold_of_trained_weights_and_the_card_has_theirs(
    job: Job, capsys: CaptureFixture[str]
) -> None:
    """Where rows say that they are twins, as own rows do; of the test split fewer than ten do."""
    mark_twins(job, "validation", 16)
    mark_twins(job, "test", 9)
    chosen(job)
    balanced = load_card(job.folder)
    assert balanced.max_fpr_twins is None
    assert run._update_threshold(toys.with_rule(job, max_fpr_twins=0.25))
    assert "chosen anew, balanced, at most 25 % of twins" in capsys.readouterr().out
    assert run._update_threshold(toys.with_rule(job, max_fpr_twins=0.25))
    assert capsys.readouterr().out == f"{job.name}: up to date\n"
    card = load_card(job.folder)
    assert (card.max_fpr_twins, flagged(card)) == (0.25, 4) and flagged(balanced) > 4
    rate = TwinRate(n=16, fpr=0.25, fpr_ci95=(0.1018, 0.495))
    assert card.twin_rate("validation") == rate
    assert str(card.twin_rate("test")) == "too few (9)"
    with pytest.raises(GuardError, match=r"too few validation twins.*16 rows, max_fpr_twins 0\.05"):
        recalibrate(toys.with_rule(job, max_fpr_twins=0.05))
    assert load_card(job.folder) == card


def test_finished_weights_have_the_rates_of_twins_of_both_splits(make_job: toys.MakeJob) -> None:
    """The toy weights rank the test rows upside down."""
    job = toys.with_rule(make_job(), max_fpr_twins=0.1)
    mark_twins(job, "validation", 16)
    mark_twins(job, "test", 16)
    toys.finish_at_once(job)
    rates = [load_card(job.folder).twin_rate(split) for split in ("validation", "test")]
    assert [rate and rate.fpr for rate in rates] == [0.0, 1.0]
