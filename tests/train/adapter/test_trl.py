"""One adapter by TRL; and the steps of every training: their order, best weights and progress."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pytest import CaptureFixture, MonkeyPatch

from guard.errors import GuardError
from guard.home import ROOT
from tests.train.conftest import MakeJob, calls_of, data, largest_difference, weights
from train.adapter.steps import AveragedWeights, EarlyStopping, LengthGrouped, Progress
from train.adapter.trl import fit, whole_checkpoint
from train.job import Job


@pytest.mark.slow
def test_a_lora_that_diverges_ends_at_once(make_job: MakeJob) -> None:
    job = make_job(max_steps=40, learning_rate=1e30, max_grad_norm=0)
    told = r"toy lora seed 0, step \d: the loss is NaN or infinite.*Lower the learning"
    with pytest.raises(GuardError, match=told):
        fit(job, data(job))


@pytest.mark.slow
def test_nothing_is_reported_to_anyone() -> None:
    script = "import train.run, huggingface_hub.constants as c; assert c.HF_HUB_DISABLE_TELEMETRY"
    environment = dict(os.environ)
    environment.pop("HF_HUB_DISABLE_TELEMETRY", None)
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True)


@pytest.mark.slow
def test_the_vocabulary_is_scored_once_a_row(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    job, products = make_job(max_steps=2), calls_of(monkeypatch, torch.nn.functional, "linear")
    fit(job, data(job))
    scored = [x.shape[:-1].numel() for x, weight, *_ in products if weight.shape[0] == 16384]
    assert scored == [8, 8]


def fit_twice(job: Job) -> None:
    """The second time as where the first was killed while its weights were written."""
    first, resumed = (weights(fit(job, data(job))) for _ in range(2))
    assert largest_difference(first, resumed) == 0


@pytest.mark.slow
def test_a_run_killed_after_its_last_step_takes_no_other(make_job: MakeJob) -> None:
    job = make_job(max_steps=10, lr_scheduler_type="constant")
    fit_twice(job)
    assert whole_checkpoint(job.scratch) == str(job.scratch / "checkpoint-5")


def test_a_checkpoint_cut_off_while_it_was_written_is_passed_over(tmp_path: Path) -> None:
    assert whole_checkpoint(tmp_path) is None
    for step, state in ((5, "{}"), (10, "{}"), (15, '{"epo'), (20, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def filled(value: float) -> list[torch.Tensor]:
    return [torch.full((2, 3), value), torch.full((4,), -value)]


def restored(stopping: EarlyStopping) -> float:
    """The step whose weights are put back; 0 if none's are."""
    target = filled(0)
    stopping.restore(target)
    return float(target[0].max())


def test_the_first_of_the_lowest_losses_is_kept_and_patience_counts_from_it(tmp_path: Path) -> None:
    """A loss that is not a number is no lower than any."""
    stopping = EarlyStopping(tmp_path, patience=2, min_steps=45)
    assert restored(stopping) == 0 and not stopping.ended(100)
    ended = []
    for step, loss in ((10, float("nan")), (20, 0.5), (30, 0.5), (40, float("nan"))):
        stopping.record(step, loss, filled(step))
        ended.append(stopping.ended(step))
    assert ended == [False] * 4  # nothing ends before the least steps
    assert [stopping.ended(step) for step in (44, 45)] == [False, True]
    assert restored(stopping) == stopping.best_step == 20


def test_a_run_resumed_before_a_recorded_evaluation_is_not_ended_by_it(tmp_path: Path) -> None:
    stopping = EarlyStopping(tmp_path, patience=1)
    stopping.record(10, 0.5, filled(10))
    stopping.record(20, 0.6, filled(20))
    again = EarlyStopping(tmp_path, patience=1)
    again.record(10, 0.7, filled(11))  # computed again, a little otherwise
    assert [again.ended(step) for step in (10, 15, 20)] == [False, False, True]
    assert restored(again) == 10


def test_weights_are_their_mean_for_a_while() -> None:
    """Later steps weigh more."""
    (weight,) = weights = [torch.nn.Parameter(torch.zeros(2))]
    average = AveragedWeights(weights)
    for step in (1, 2):
        weight.data.fill_(5.0 * step)
        average.update(step)
    with pytest.raises(KeyboardInterrupt), average.in_place():
        assert weight.tolist() == [9.0, 9.0]  # (5 + 4 x 10) / 5
        raise KeyboardInterrupt
    assert weight.tolist() == [10.0, 10.0]


def test_an_epoch_holds_every_row_once_with_neighbours_of_similar_length() -> None:
    lengths = [(index * 37) % 101 for index in range(96)]
    order = list(LengthGrouped(lengths, batch_rows=8, seed=0))
    assert sorted(order) == list(range(96))
    batches = [[lengths[index] for index in order[at : at + 8]] for at in range(0, 96, 8)]
    spread = sorted(max(batch) - min(batch) for batch in batches)
    assert spread[len(spread) // 2] < 40  # of 100 in random order


def test_the_order_of_an_epoch_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = LengthGrouped(list(range(64)), batch_rows=4, seed=seed)
        sampler.set_epoch(epoch)
        torch.rand(1)  # the global generator is elsewhere in a resumed run
        return list(sampler)

    assert order(0, 1) == order(0, 1) != order(0, 2)
    assert order(0, 1) != order(1, 1)


def test_each_epoch_is_one_line(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    # Resumed in the middle of the first epoch.
    progress = Progress("toy alora seed 0", step=2, steps=10, steps_per_epoch=4)
    for step in range(3, 11):
        now += 30.0
        progress.loss(1.0 / step)
        progress.step(step)
    assert capsys.readouterr().out.splitlines() == [
        "toy alora seed 0: epoch 1 of 3, loss 0.292, 03:00 left",
        "toy alora seed 0: epoch 2 of 3, loss 0.159, 01:00 left",
        "toy alora seed 0: epoch 3 of 3, loss 0.106, 00:00 left",
    ]
