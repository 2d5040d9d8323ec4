"""The best weights win, patience ends the rest, and a resumed run decides as a whole one."""

from __future__ import annotations

from pathlib import Path

import torch

from train.adapter.early_stopping import EarlyStopping


def weights(value: float) -> list[torch.Tensor]:
    return [torch.full((2, 3), value), torch.full((4,), -value)]


def test_the_first_of_the_lowest_losses_is_kept_and_patience_counts_from_it(tmp_path: Path) -> None:
    stopping = EarlyStopping(tmp_path, patience=2)
    ended = []
    for step, loss in ((10, 0.7), (20, 0.5), (30, 0.5), (40, 0.6)):
        stopping.record(step, loss, weights(step))
        ended.append(stopping.ended(step))
    assert ended == [False, False, False, True]
    target = weights(0)
    stopping.restore(target)
    assert [float(weight.flatten()[0]) for weight in target] == [20, -20]


def test_a_loss_that_is_not_a_number_is_no_lower_than_any(tmp_path: Path) -> None:
    stopping = EarlyStopping(tmp_path, patience=2)
    for step, loss in ((8, float("nan")), (16, 0.5), (24, 0.1), (32, float("nan"))):
        stopping.record(step, loss, weights(step))
    assert stopping.best_step == 24
    target = weights(0)
    stopping.restore(target)
    torch.testing.assert_close(target, weights(24))


def test_nothing_ends_before_the_least_steps(tmp_path: Path) -> None:
    stopping = EarlyStopping(tmp_path, patience=1, min_steps=25)
    for step, loss in ((10, 0.5), (20, 0.6)):
        stopping.record(step, loss, weights(step))
    assert [stopping.ended(step) for step in (20, 24, 25)] == [False, False, True]


def test_a_run_resumed_before_a_recorded_evaluation_is_not_ended_by_it(tmp_path: Path) -> None:
    stopping = EarlyStopping(tmp_path, patience=1)
    stopping.record(10, 0.5, weights(10))
    stopping.record(20, 0.6, weights(20))
    again = EarlyStopping(tmp_path, patience=1)
    again.record(10, 0.7, weights(11))  # computed again, a little otherwise
    assert again.ended(20)
    assert not again.ended(15)
    assert not again.ended(10)
    target = weights(0)
    again.restore(target)
    torch.testing.assert_close(target, weights(10))


def test_without_a_recorded_evaluation_the_weights_stay(tmp_path: Path) -> None:
    target = weights(3)
    stopping = EarlyStopping(tmp_path, patience=1)
    stopping.restore(target)
    assert not stopping.ended(100)
    torch.testing.assert_close(target, weights(3))
