"""One line an epoch, with the loss and the time left."""

from __future__ import annotations

import pytest
from pytest import CaptureFixture, MonkeyPatch

from train.adapter.progress import Progress, duration


def test_each_epoch_is_one_line(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = Progress(
        "toy alora seed 0", step=2, steps=10, steps_per_epoch=4
    )  # resumed in the middle of the first epoch
    for step in range(3, 11):
        now += 30.0
        progress.loss(1.0 / step)
        progress.step(step)
    assert capsys.readouterr().out.splitlines() == [
        "toy alora seed 0: epoch 1 of 3, loss 0.292, 3 min left",
        "toy alora seed 0: epoch 2 of 3, loss 0.159, 60 s left",
        "toy alora seed 0: epoch 3 of 3, loss 0.106, 0 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (99, "99 s"), (130, "2 min"), (5999, "100 min"), (9000, "2.5 h")],
)
def test_a_duration_has_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text
