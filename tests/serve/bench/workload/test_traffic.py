"""Traffic and the clock beside it, which the benchmarks of fleets and load run on real servers."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from serve.bench.workload.traffic import LENGTHS, RULES, arrivals, open_loop, poisson, zipf
from tests.serve.cards import prompts


@dataclass
class Answered:
    done: bool = True


def test_requests_that_wait_for_a_slow_server_count_their_waiting() -> None:

    def submit(_: int) -> Answered:
        time.sleep(0.02)
        return Answered()

    assert open_loop(submit, lambda: None, [0.0, 0.001]).latencies_s[1] >= 0.035


def test_poisson_times_come_at_the_rate_and_in_order() -> None:
    due = poisson(100, 10_000, seed=1)
    assert due == sorted(due)
    assert due[-1] == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("alpha", [0.5, 1.2])
def test_zipf_s_law_is_followed(alpha: float) -> None:
    drawn = Counter(zipf(50, alpha, 200_000, seed=1))
    assert drawn[0] / drawn[9] == pytest.approx(10**alpha, rel=0.1)
    few = [zipf(50, alpha, 100, seed) for seed in (1, 1, 2)]
    assert few[0] == few[1] != few[2]


def test_conversations_have_real_lengths_and_a_few_rules_each() -> None:
    drawn = arrivals(prompts(), 5.0, 200, seed=3)
    lengths = sorted(len(prompts().prefix_ids(arrival.messages)) for arrival in drawn)
    assert lengths[0] >= LENGTHS[0] - 5 and lengths[-1] <= LENGTHS[-1] + 5
    assert np.median(lengths) == pytest.approx(LENGTHS[10], rel=0.1)
    assert {len(arrival.rules) for arrival in drawn} == set(range(RULES[0], RULES[1] + 1))
    assert all(len(set(arrival.rules)) == len(arrival.rules) for arrival in drawn)
    assert drawn[-1].due_s == pytest.approx(40, rel=0.3)
    assert drawn == arrivals(prompts(), 5.0, 200, seed=3)
    others = arrivals(prompts(), 5.0, 200, seed=4)
    assert not {arrival.messages for arrival in drawn} & {arrival.messages for arrival in others}
