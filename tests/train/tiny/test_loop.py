"""The loop on a linear model: rates, running means, checkpoints that resume to the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from guard.errors import GuardError
from train.tiny.loop import (
    Checkpoint,
    Learner,
    parameter_groups,
    share_of_peak,
    train,
)

STEPS = 6


class Line(Learner):
    """A linear layer that learns to give zeros."""

    name = "line"
    weights_name = "line"
    newest_share = 0.5

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.figures = {}
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model.parameters()))
        self.seen: list[int] = []

    def gradients(self, step: int) -> dict[str, float]:
        self.seen.append(step)
        generator = torch.Generator().manual_seed(step)
        loss = self.model(torch.randn(4, 3, generator=generator)).square().mean()
        loss.backward()
        return {"step": float(step)}

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def learning_rates(self, step: int) -> Sequence[float]:
        return (0.1 * share_of_peak(step, STEPS),) * 2

    def progress(self) -> dict[str, Any]:
        return {"figures": self.figures}

    def restore_progress(self, state: dict[str, Any]) -> None:
        self.figures = state["figures"]


def run(file: Path, made_from: dict[str, Any] | str = "data", **options: int) -> Line:
    line = Line()
    train(line, Checkpoint(file, made_from), steps=STEPS, **options)
    return line


def test_an_interrupted_run_goes_on_to_the_same_weights_and_means(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole.pt")
    cut = run(tmp_path / "cut.pt", stop_after=4)
    resumed = run(tmp_path / "cut.pt")
    assert (cut.seen, resumed.seen) == ([0, 1, 2, 3], [4, 5])
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert resumed.figures == whole.figures == {"step": pytest.approx(4.03, abs=0.01)}
    assert run(tmp_path / "cut.pt").seen == []


def test_what_was_saved_on_the_way_is_enough_to_go_on(tmp_path: Path) -> None:
    line = Line()
    checkpoint = Checkpoint(tmp_path / "checkpoint.pt", "data")
    line.clip = lambda: fail_at(line.seen[-1])  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        train(line, checkpoint, steps=STEPS, save_every=2)
    assert run(checkpoint.file).seen == [4, 5]


def fail_at(step: int) -> None:
    if step == 5:
        raise RuntimeError("power cut")


def test_a_checkpoint_names_what_differs_where_it_knows(tmp_path: Path) -> None:
    run(tmp_path / "named.pt", {"data": "1", "seed": 0}, stop_after=1)
    with pytest.raises(GuardError, match=r"named\.pt: .*\(got other seed\)\. Repeat"):
        run(tmp_path / "named.pt", {"data": "1", "seed": 1})
    run(tmp_path / "hashed.pt", "1", stop_after=1)
    with pytest.raises(GuardError, match=r"hashed\.pt: .*something else\. Repeat"):
        run(tmp_path / "hashed.pt", "2")
    with pytest.raises(GuardError, match=r"hashed\.pt: .*something else\. Repeat"):
        run(tmp_path / "hashed.pt", {"data": "1"})  # as of another kind of run in one folder


def test_the_rate_warms_up_stays_and_falls_over_the_last_third() -> None:
    rates = [share_of_peak(step, 600, first=40) for step in range(600)]
    assert rates[40] == pytest.approx(1 / 60)
    assert set(rates[99:401]) == {1.0}
    assert rates[500] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(1 / 200)


def test_only_what_is_trained_is_optimized_and_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model[0].bias.requires_grad_(False)
    matrices, vectors = parameter_groups(model.parameters())
    assert matrices["params"] == [model[0].weight]
    assert vectors["params"] == list(model[1].parameters())
    assert matrices["weight_decay"] > vectors["weight_decay"] == 0
