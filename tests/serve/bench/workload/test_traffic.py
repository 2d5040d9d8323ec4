"""Traffic and the clock: on a toy server whose answers take two steps."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from serve.bench.workload.traffic import Done, closed_loop, open_loop, poisson, round_robin, zipf


class Toy:
    """Answers everything that is in flight in the second step after it was submitted."""

    def __init__(self) -> None:
        self.steps = 0
        self.most_in_flight = 0
        self._open: list[int] = []

    def submit(self, number: int) -> Done:
        submitted_at = self.steps
        self._open.append(number)
        self.most_in_flight = max(self.most_in_flight, len(self._open))

        def done() -> bool:
            if self.steps >= submitted_at + 2 and number in self._open:
                self._open.remove(number)
            return self.steps >= submitted_at + 2

        return done

    def step(self) -> None:
        self.steps += 1
        time.sleep(0.001)


def test_a_closed_loop_keeps_its_workers_busy_and_answers_everything() -> None:
    toy = Toy()
    timed = closed_loop(toy.submit, toy.step, requests=30, workers=4)
    assert len(timed.latencies_s) == 30
    assert toy.most_in_flight == 4
    assert toy.steps == 2 * 8  # thirty requests, four at a time, two steps each
    assert all(0.002 <= latency <= timed.wall_s for latency in timed.latencies_s)
    assert timed.per_second == pytest.approx(30 / timed.wall_s)


def test_an_open_loop_submits_when_it_is_due_and_counts_from_then() -> None:
    toy = Toy()
    due = [0.0, 0.0, 0.5, 0.5]
    timed = open_loop(toy.submit, toy.step, due)
    assert timed.wall_s >= 0.5
    assert toy.most_in_flight == 2
    assert all(latency >= 0.002 for latency in timed.latencies_s)


def test_requests_that_wait_for_a_slow_server_count_their_waiting() -> None:
    def submit(number: int) -> Done:
        time.sleep(0.02)
        return lambda: True

    timed = open_loop(submit, lambda: None, [0.0, 0.001])
    assert timed.latencies_s[1] >= 0.035


def test_poisson_times_come_at_the_rate_and_in_order() -> None:
    due = poisson(100, 10_000, seed=1)
    assert due == sorted(due)
    assert due[-1] == pytest.approx(100, rel=0.05)


def test_round_robin_uses_every_adapter_equally_often() -> None:
    assert round_robin(3, 7) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("alpha", [0.5, 1.2])
def test_zipf_s_law_is_followed(alpha: float) -> None:
    drawn = Counter(zipf(50, alpha, 200_000, seed=1))
    assert drawn[0] / drawn[9] == pytest.approx(10**alpha, rel=0.1)
    assert (
        zipf(50, alpha, 100, seed=1) == zipf(50, alpha, 100, seed=1) != zipf(50, alpha, 100, seed=2)
    )
