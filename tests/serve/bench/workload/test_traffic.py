"""Traffic and the clock: on a toy server whose answers take two steps. Arrivals."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from guard.conversation.example import Message
from serve.bench.workload.traffic import (
    LENGTHS,
    RULES,
    arrivals,
    closed_loop,
    open_loop,
    poisson,
    zipf,
)
from tests.serve.cards import prompts


class Toy:
    """Answers everything that is in flight in the second step after it was submitted."""

    def __init__(self) -> None:
        self.steps = 0
        self.most_in_flight = 0
        self._open: list[int] = []

    def submit(self, number: int) -> ToyAnswer:
        self._open.append(number)
        self.most_in_flight = max(self.most_in_flight, len(self._open))
        return ToyAnswer(self, number, self.steps + 2)

    def answered(self, number: int) -> None:
        if number in self._open:
            self._open.remove(number)

    def step(self) -> None:
        self.steps += 1
        time.sleep(0.001)


@dataclass
class ToyAnswer:
    server: Toy
    number: int
    due_step: int

    @property
    def done(self) -> bool:
        if self.server.steps < self.due_step:
            return False
        self.server.answered(self.number)
        return True


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
    toy = Toy()

    def submit(number: int) -> ToyAnswer:
        time.sleep(0.02)
        return ToyAnswer(toy, number, 0)

    timed = open_loop(submit, lambda: None, [0.0, 0.001])
    assert timed.latencies_s[1] >= 0.035


def test_poisson_times_come_at_the_rate_and_in_order() -> None:
    due = poisson(100, 10_000, seed=1)
    assert due == sorted(due)
    assert due[-1] == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("alpha", [0.5, 1.2])
def test_zipf_s_law_is_followed(alpha: float) -> None:
    drawn = Counter(zipf(50, alpha, 200_000, seed=1))
    assert drawn[0] / drawn[9] == pytest.approx(10**alpha, rel=0.1)
    assert (
        zipf(50, alpha, 100, seed=1) == zipf(50, alpha, 100, seed=1) != zipf(50, alpha, 100, seed=2)
    )


def test_conversations_have_real_lengths_and_a_few_rules_each() -> None:
    drawn = arrivals(prompts(), 5.0, 200, seed=3)
    lengths = sorted(len(prompts().prefix_ids(arrival.messages)) for arrival in drawn)
    assert lengths[0] >= LENGTHS[0] - 5 and lengths[-1] <= LENGTHS[-1] + 5
    assert np.median(lengths) == pytest.approx(LENGTHS[10], rel=0.1)
    assert {len(arrival.rules) for arrival in drawn} == set(range(RULES[0], RULES[1] + 1))
    assert all(len(set(arrival.rules)) == len(arrival.rules) for arrival in drawn)
    assert drawn[-1].due_s == pytest.approx(40, rel=0.3)
    assert drawn == arrivals(prompts(), 5.0, 200, seed=3) != arrivals(prompts(), 5.0, 200, seed=4)


def test_no_two_runs_have_a_conversation_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(_: object, __: int, seed: int) -> tuple[Message, ...]:
        return (Message("user", f"conversation {seed}"),)

    monkeypatch.setattr("serve.bench.workload.traffic.conversation", named)
    runs = [arrivals(prompts(), 5.0, 1200, seed) for seed in (0, 1, 2)]
    assert len({arrival.messages for run in runs for arrival in run}) == 3 * 1200
