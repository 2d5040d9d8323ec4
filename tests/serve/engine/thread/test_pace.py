"""The pace is that of the last answers to checks that came together, and counts all work."""

from __future__ import annotations

import pytest
from pytest import MonkeyPatch

from serve.engine.thread.pace import LEAST_ANSWERS, REMEMBERED, Pace


def test_nothing_is_known_before_a_few_answers() -> None:
    pace = Pace()
    for _ in range(LEAST_ANSWERS - 1):
        pace.ran(1.0, 1, 2)
    assert pace.seconds(100) == 0
    pace.ran(1.0, 1, 2)
    assert pace.seconds(100) == pytest.approx(100)


def test_checks_that_come_one_by_one_say_nothing_of_many() -> None:
    pace = Pace()
    for _ in range(100):
        pace.ran(1.0, 1, 1)
    assert pace.seconds(32) == 0


def test_batches_with_several_answers_and_work_without_any_are_counted() -> None:
    pace = Pace()
    pace.ran(1.0, 0, 20)  # thrown away
    pace.ran(3.0, 16, 20)
    assert pace.seconds(4) == pytest.approx(1.0)
    pace.ran(4.0, 0, 20)
    assert pace.seconds(4) == pytest.approx(2.0)


def test_what_took_long_once_is_forgotten() -> None:
    pace = Pace()
    pace.ran(1000.0, 8, 8)
    for _ in range(REMEMBERED):
        pace.ran(0.5, 1, 2)
    assert pace.seconds(2) == pytest.approx(1.0)


def test_one_batch_with_more_answers_than_are_remembered_counts_whole() -> None:
    pace = Pace()
    for _ in range(3):
        pace.ran(2.0, 10 * REMEMBERED, 32)
        assert pace.seconds(REMEMBERED) == pytest.approx(0.2)


def test_after_a_quiet_while_nothing_is_known(monkeypatch: MonkeyPatch) -> None:
    pace = Pace()
    for _ in range(20):
        pace.ran(5.0, 1, 2)
    assert pace.seconds(2) == pytest.approx(10)
    monkeypatch.setattr("serve.engine.thread.pace.FORGET_S", -1.0)
    assert pace.seconds(2) == 0
    pace.ran(0.1, 1, 2)
    monkeypatch.setattr("serve.engine.thread.pace.FORGET_S", 10.0)
    assert pace.seconds(2) == 0  # one answer is not enough
