"""One adapter: its loss, what changes, and that the same seed gives the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pytest import MonkeyPatch

from guard.errors import GuardError
from guard.home import ROOT
from tests.train.conftest import MakeJob, calls_of, data, largest_difference, weights, with_settings
from train.adapter.steps import EarlyStopping
from train.adapter.trl import fit, whole_checkpoint
from train.job import Job

pytestmark = pytest.mark.slow


def test_a_lora_that_diverges_ends_at_once(make_job: MakeJob) -> None:
    job = make_job(max_steps=40, learning_rate=1e30, max_grad_norm=0)
    told = r"toy lora seed 0, step \d: the loss is NaN or infinite.*Lower the learning"
    with pytest.raises(GuardError, match=told):
        fit(job, data(job))


def test_nothing_is_reported_to_anyone() -> None:
    script = "import train.run, huggingface_hub.constants as c; assert c.HF_HUB_DISABLE_TELEMETRY"
    environment = dict(os.environ)
    environment.pop("HF_HUB_DISABLE_TELEMETRY", None)
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True)


def test_the_vocabulary_is_scored_once_a_row(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    job, products = make_job(max_steps=2), calls_of(monkeypatch, torch.nn.functional, "linear")
    fit(job, data(job))
    scored = [x.shape[:-1].numel() for x, weight, *_ in products if weight.shape[0] == 16384]
    assert scored == [8, 8]


def fit_twice(job: Job) -> None:
    """The second time as where the first was killed while its weights were written."""
    first, resumed = (weights(fit(job, data(job))) for _ in range(2))
    assert largest_difference(first, resumed) == 0


def test_a_run_killed_after_its_last_step_takes_no_other(make_job: MakeJob) -> None:
    job = make_job(max_steps=10, lr_scheduler_type="constant")
    fit_twice(job)
    assert whole_checkpoint(job.scratch) == str(job.scratch / "checkpoint-5")


def test_killed_after_it_stopped_early(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    """It stops at step 15, whose checkpoint is due, before an epoch's end that would be better."""
    losses = {8: 0.5, 16: 0.1}
    record = EarlyStopping.record
    monkeypatch.setattr(
        EarlyStopping, "record", lambda self, step, _, best: record(self, step, losses[step], best)
    )
    monkeypatch.setattr(EarlyStopping, "ended", lambda self, step: step >= 15)
    job = make_job(max_steps=-1, lr_scheduler_type="constant")
    fit_twice(with_settings(job, early_stopping_patience=1))


def test_a_checkpoint_cut_off_while_it_was_written_is_passed_over(tmp_path: Path) -> None:
    assert whole_checkpoint(tmp_path) is None
    for step, state in ((5, "{}"), (10, "{}"), (15, '{"epo'), (20, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
