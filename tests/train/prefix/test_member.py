"""One adapter among others: its optimizer, its checkpoints, and how it resumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from tests.train.conftest import (
    ADAPTERS,
    MakeJob,
    calls_of,
    data,
    fitted,
    largest_difference,
    with_lora,
    with_settings,
)
from train.adapter import trl
from train.adapter.steps import EarlyStopping, Progress
from train.job import Job
from train.prefix.member import CHECKPOINT, Member

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "patience", "dropout", "alone", "head"),
    [
        ((1, 16), None, 0.0, True, None),
        ((4, 16), None, 0.0, False, None),
        ((16, 16), 1, 0.0, False, None),
        ((16,), None, 0.3, True, None),
        ((16,), None, 0.0, True, {}),
        ((4, 16), None, 0.0, False, {}),
    ],
)
def test_killed_adapters_go_on_in_whatever_company_to_what_they_would_have_been(
    make_job: MakeJob,
    monkeypatch: MonkeyPatch,
    ranks: Any,
    patience: Any,
    dropout: Any,
    alone: Any,
    head: Any,
) -> None:
    def jobs(runs: str) -> list[Job]:
        made: list[Job] = []
        for seed, rank in enumerate(ranks):
            steps = {"max_steps": 20 - 4 * seed, "save_steps": 5 - 2 * seed}
            job = make_job("alora", runs=f"{runs}{seed}", seed=seed, learning_rate=3e-3, **steps)
            job = with_lora(job, r=rank, lora_dropout=dropout)
            made.append(with_settings(job, early_stopping_patience=patience, head=head))
        return made

    update, done = Member.update, []

    def killed(member: Member, loss: float) -> None:
        if member.step == 12:
            raise KeyboardInterrupt
        update(member, loss)

    def counted(member: Member, loss: float) -> None:
        done.append(member.step)
        update(member, loss)

    # A head is averaged: its last evaluation tells of all steps.
    best = 20 if head is not None else 8
    record_losses(monkeypatch, lambda step: 0.3 if step == best else 0.4)
    expected = fitted(*jobs("whole"))
    monkeypatch.setattr(Member, "update", killed)
    with pytest.raises(KeyboardInterrupt):
        fitted(*jobs("killed"))
    monkeypatch.setattr(Member, "update", counted)
    left = jobs("killed")
    assert [torch.load(job.scratch / CHECKPOINT)["step"] for job in left] == [10, 12][: len(ranks)]
    found = [fitted(job)[0] for job in left] if alone else fitted(*left)
    # The first epoch was the best, the second the last.
    assert 0 not in done and max(done) == (15 if patience else 19)
    for one, other in zip(found, expected, strict=True):
        largest = max(float(weight.abs().max()) for weight in other.values())
        assert largest_difference(one, other) < 2e-3 * largest


def record_losses(monkeypatch: MonkeyPatch, loss_at: Callable[[int], float]) -> None:
    """The validation loss that early stopping is told at each step."""
    record = EarlyStopping.record
    monkeypatch.setattr(
        EarlyStopping, "record", lambda self, step, _, best: record(self, step, loss_at(step), best)
    )


def test_no_bound_on_the_gradients_means_none(make_job: MakeJob) -> None:
    found, expected = (
        fitted(make_job("alora", max_steps=4, max_grad_norm=norm, runs=str(norm)))[0]
        for norm in (0, 1e9)
    )
    assert largest_difference(found, expected) == 0


def test_a_checkpoint_each_share_of_the_steps(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    saved: list[int] = []
    monkeypatch.setattr(
        torch, "save", lambda state, path: (saved.append(state["step"]), path.touch())
    )
    fitted(make_job("alora", max_steps=7, save_steps=0.4))
    fitted(make_job("alora", max_steps=7, save_steps=0, runs="never"))
    assert saved == [3, 6]


@pytest.mark.parametrize("method", ADAPTERS)
@pytest.mark.parametrize(("epochs", "patience"), [(10, 1), (1, None)])
def test_training_takes_the_least_steps(
    make_job: MakeJob, monkeypatch: MonkeyPatch, method: str, epochs: int, patience: int | None
) -> None:
    """An epoch of 16 rows is two steps; the first is the best."""
    losses = calls_of(monkeypatch, Progress, "loss")
    record_losses(monkeypatch, float)
    job = make_job(method, n_train=16, num_train_epochs=epochs)
    job = with_settings(job, early_stopping_patience=patience, min_steps=7)
    fitted(job) if method == "alora" else trl.fit(job, data(job))
    assert len(losses) == 7
