"""The pace is that of the last answers, and counts all work."""

from __future__ import annotations

import pytest

from serve.engine.pace import LEAST_ANSWERS, REMEMBERED, Pace


def test_nothing_is_known_before_a_few_answers() -> None:
    pace = Pace()
    for _ in range(LEAST_ANSWERS - 1):
        pace.ran(1.0, 1)
    assert pace.seconds(100) == 0
    pace.ran(1.0, 1)
    assert pace.seconds(100) == pytest.approx(100)


def test_batches_with_several_answers_and_work_without_any_are_counted() -> None:
    pace = Pace()
    pace.ran(1.0, 0)  # thrown away
    pace.ran(3.0, 16)
    assert pace.seconds(4) == pytest.approx(1.0)


def test_what_took_long_once_is_forgotten() -> None:
    pace = Pace()
    pace.ran(1000.0, 8)
    for _ in range(REMEMBERED):
        pace.ran(0.5, 1)
    assert pace.seconds(2) == pytest.approx(1.0)


def test_one_batch_with_more_answers_than_are_remembered_counts_whole() -> None:
    pace = Pace()
    for _ in range(3):
        pace.ran(2.0, 10 * REMEMBERED)
        assert pace.seconds(REMEMBERED) == pytest.approx(0.2)
