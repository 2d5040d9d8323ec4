"""Another threshold by one command: for a rate, as stated, or by the rule's file."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from guard.conversation.example import read_examples
from guard.errors import GuardError
from guard.home import ROOT
from guard.weights.card import load_card
from guard.weights.predictions import write_predictions
from tests.train.conftest import MakeJob
from tests.train.test_export import exported
from train import calibrate, run
from train.calibrate import ThresholdChoice, calibrate_rules
from train.job import Job

pytestmark = pytest.mark.slow


@pytest.fixture
def job(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Weights whose violating rows have logits from 1 up, and allowed ones from -3."""
    job = make_job(max_steps=1)
    exported(job)
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


def chosen(job: Job, choice: ThresholdChoice) -> None:
    calibrate_rules(job.rule.id, job.recipe, [job.method], choice, job.runs)


def test_a_stated_threshold_is_taken_and_what_it_changes_is_printed(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    before = load_card(job.folder)
    chosen(job, ThresholdChoice(threshold=0.9))
    after = load_card(job.folder)
    assert (after.threshold, after.threshold_by, after.max_fpr) == (0.9, "threshold", None)
    assert after.version != before.version and after.files == before.files
    assert after.uncertainty_band[0] <= 0.9 <= after.uncertainty_band[1]
    rows = read_examples(job.data / "test.jsonl")
    allowed = [place - 3.0 for place in range(sum(row.label == 0 for row in rows))]
    flagged = sum(after.calibration.verdict("", logit).violates for logit in allowed)
    printed = capsys.readouterr().out
    assert f"-> 0.900, as stated; version {before.version[:12]} -> {after.version[:12]}" in printed
    last = printed.splitlines()[-1]
    assert last.strip().startswith("after") and f"({flagged} of {len(allowed)})" in last


def test_a_rate_is_kept_by_later_trainings_until_the_rule_decides_again(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen(job, ThresholdChoice(max_fpr=0.25))
    asked = load_card(job.folder)
    assert (asked.threshold_by, asked.max_fpr) == ("max_fpr", 0.25)
    assert "for at most 25 % false positives, as asked" in capsys.readouterr().out
    assert run.outdated_jobs([job], force=False) == ([], [])
    assert "as `make calibrate` was told" in capsys.readouterr().out
    assert load_card(job.folder) == asked
    chosen(job, ThresholdChoice())
    by_rule = load_card(job.folder)
    assert (by_rule.threshold_by, by_rule.max_fpr) == ("rule", None)
    assert "balanced, by the rule's file" in capsys.readouterr().out


def test_a_rule_without_weights_is_named_with_the_command_that_trains_them(job: Job) -> None:
    shutil.rmtree(job.folder)
    with pytest.raises(GuardError, match=f"no weights to calibrate.*make train RULE={job.rule.id}"):
        chosen(job, ThresholdChoice())


def test_another_rule_s_weights_are_not_touched(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    other = job.rule.model_copy(update={"id": "other"})
    there = replace(job, rule=other)
    shutil.copytree(job.folder, there.folder)
    shutil.copytree(job.data, there.data)
    monkeypatch.setattr(calibrate, "load_rule", lambda name: other)
    with pytest.raises(GuardError, match="not of the rule 'other'"):
        calibrate_rules("other", job.recipe, [job.method], ThresholdChoice(threshold=0.9), job.runs)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--max-fpr", "2"], "between 0 and 1"),
        (["--threshold", "x"], "between 0 and 1"),
        (["--threshold", "0.5", "--max-fpr", "0.1"], "not allowed with"),
        (["--method", "magic"], "magic"),
    ],
)
def test_bad_options_are_named(
    words: list[str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(Path(ROOT))
    monkeypatch.setattr(sys, "argv", ["calibrate", "--rule", "toxicity", *words])
    with pytest.raises(SystemExit) as ended:
        calibrate.main()
    assert ended.value.code == 2 and problem in capsys.readouterr().err
