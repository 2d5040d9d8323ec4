"""The simulation against what queueing theory and arithmetic say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serve.engine.backends.arguments import Sizes
from serve.plan.batching import ReplicaSizes
from serve.plan.calibration import FittedCost
from serve.plan.deployment import PlannedMethod, deploy
from serve.plan.replica import (
    ConversationCache,
    Replay,
    ReplicaSimulation,
    at_rate,
    capacity,
    saturation,
)
from serve.plan.report import planned_traffic
from serve.plan.traffic import CheckArrival, TrafficSource
from tests.serve.plan.on_paper import calibrated, check, linear, plan, sizes

SERVICE_S = 0.01
CHECKS = 60_000


def simulated(
    arrivals: list[CheckArrival],
    of: ReplicaSizes,
    cost: FittedCost | None = None,
    *,
    shares: bool = True,
    warm_up: int = 0,
) -> Replay:
    name = "alora" if shares else "lora"
    method = PlannedMethod(name, cost or linear(tokens=1.0), 1, of, bytes_of=Sizes(1, 1, 1, 1))
    return ReplicaSimulation(method).run(arrivals, warm_up)


def one_by_one(tokens: np.ndarray, rate: float, seed: int) -> Replay:
    """Poisson arrivals at a replica whose steps hold one check; the work is in its tokens."""
    draw = np.random.default_rng(seed)
    due_s = draw.exponential(1 / rate, len(tokens)).cumsum()
    arrivals = [
        CheckArrival(float(due), number, int(size), (0,))
        for number, (due, size) in enumerate(zip(due_s, tokens, strict=True))
    ]
    one = sizes(step_tokens=10**9, max_sequences=1)
    return simulated(arrivals, one, linear(tokens=1e-3))


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_latencies_are_those_of_queueing_theory(load: float) -> None:
    constant = one_by_one(np.full(CHECKS, SERVICE_S * 1e6 - 1), load / SERVICE_S, seed=1)
    expected_s = SERVICE_S * (1 + load / (2 * (1 - load)))  # M/D/1: Pollaczek and Khinchine
    assert constant.latencies_s.mean() == pytest.approx(expected_s, rel=0.05)
    assert constant.busy_s / constant.wall_s == pytest.approx(load, rel=0.03)
    draw = np.random.default_rng(7)
    tokens = np.maximum(0, draw.exponential(SERVICE_S * 1e6, CHECKS))
    exponential = one_by_one(tokens, load / SERVICE_S, seed=2)
    assert exponential.latencies_s.mean() == pytest.approx(SERVICE_S / (1 - load), rel=0.07)
    # Latencies of M/M/1 are exponential too.
    p95_s = -np.log(0.05) * SERVICE_S / (1 - load)
    assert exponential.p95_ms == pytest.approx(1000 * p95_s, rel=0.1)


def test_a_check_that_comes_during_a_step_waits_for_its_end_and_joins_the_next() -> None:
    arrivals = [check(0.0, 9), check(0.004, 4, session=1), check(0.005, 4, session=2)]
    result = simulated(arrivals, sizes())
    assert result.latencies_s == pytest.approx([0.010, 0.020 - 0.004, 0.020 - 0.005])
    assert result.work.steps == 2 and result.work.tokens == 10 + 2 * 5


def test_every_check_is_answered_no_sooner_than_alone_and_no_token_is_lost() -> None:
    draw = np.random.default_rng(3)
    arrivals = []
    for number in range(500):
        tokens, rules = int(draw.integers(1, 300)), int(draw.integers(1, 20))
        arrivals.append(check(number * 0.05, tokens, rules, session=number))
    for shares in (True, False):
        result = simulated(arrivals, sizes(), shares=shares)
        needed = [
            arrival.tokens * (1 if shares else len(arrival.rules)) + len(arrival.rules)
            for arrival in arrivals
        ]
        assert result.work.tokens == sum(needed)
        assert result.work.sequences >= sum(len(arrival.rules) for arrival in arrivals)
        assert all(result.latencies_s >= np.asarray(needed) / 1000 - 1e-9)
        assert result.busy_s <= result.wall_s
        assert result.busy_s == pytest.approx(sum(needed) / 1000)


def test_a_turn_computes_only_what_is_new_while_the_cache_holds_the_rest() -> None:
    turns = [check(0.0, 50), check(1.0, 80), check(2.0, 60, session=1), check(3.0, 90)]
    assert simulated(turns, sizes()).work.tokens == 50 + 30 + 60 + 10 + 4
    crowded = simulated(turns, sizes(cache_tokens=100))
    assert crowded.work.tokens == 50 + 30 + 60 + 90 + 4, "the second conversation evicts the first"
    assert crowded.cached_tokens == 50 and crowded.hit_rate == 50 / 280
    by_lora = [check(0.0, 50, rules=2), check(1.0, 60, 2, session=1), check(2.0, 50, rules=2)]
    for cache_tokens, cached in ((200, 0), (300, 50)):  # a copy a rule
        found = simulated(by_lora, sizes(cache_tokens=cache_tokens), shares=False)
        assert found.cached_tokens == cached


def test_of_what_fills_the_cache_nothing_is_counted() -> None:
    turns = [check(0.0, 50), check(1.0, 30, session=1), check(2.0, 60)]
    result = simulated(turns, sizes(), warm_up=1)
    assert len(result.latencies_s) == 2 and result.work.tokens == 30 + 1 + 10 + 1
    assert result.hit_rate == 50 / 90
    assert result.busy_s == pytest.approx(0.042) and result.wall_s == pytest.approx(1.011)


def test_a_recorded_hit_counts_instead_of_the_simulation_s_where_rules_share() -> None:
    """Else a plan gives LoRA the cache of the aLoRA server whose log it reads."""
    recorded = [check(0.0, 50), check(1.0, 50, session=1)._replace(cached_tokens=10)]
    assert simulated(recorded, sizes()).work.tokens == 50 + 40 + 2
    assert simulated(recorded, sizes(), shares=False).work.tokens == 50 + 50 + 2


def test_adapters_without_a_slot_cost_their_copies_and_reads() -> None:
    few = sizes(adapters=4, host_adapters=2, slots=1)
    arrivals = [CheckArrival(float(number), number, 9, (number % 4,)) for number in range(8)]
    result = simulated(arrivals, few, linear(tokens=1.0, swap_in_ms=5.0, load_ms=7.0))
    work = result.work
    assert work.swap_ins > 0 and work.loads > 0
    assert result.busy_s == pytest.approx((80 + 5 * work.swap_ins + 7 * work.loads) / 1000)


def test_no_more_checks_are_open_than_the_server_opens() -> None:
    arrivals = [check(0.0, 9, session=number) for number in range(4)]
    free = simulated(arrivals, sizes())
    assert free.latencies_s == pytest.approx([0.04] * 4), "one step for all"
    assert simulated(arrivals, sizes(max_open=1)).latencies_s == pytest.approx(
        [0.01, 0.02, 0.03, 0.04]
    )


def test_the_conversation_used_least_recently_goes_first_and_the_scaffold_stays() -> None:
    cache = ConversationCache(sizes(cache_tokens=100))
    for session in (0, 1, 0, 2):
        cache.put(session, 40, 1)
    assert [cache.held(session) for session in range(3)] == [40, 0, 40]
    cache.put(3, 30, 3)  # a copy a rule
    assert [cache.held(session) for session in range(4)] == [0, 0, 0, 30]
    cache = ConversationCache(sizes(cache_tokens=1000, block_size=32, scaffold_tokens=32))
    assert cache.held(0) == 0
    cache.put(0, 100, 1)
    assert cache.held(0) == 96 and cache.held(1) == 32


def test_a_check_that_finds_the_engine_asleep_takes_longer_and_no_other() -> None:
    arrivals = [check(0.0, 9), check(0.005, 9, session=1), check(1.0, 9, session=2)]
    waking = linear(tokens=1.0).model_copy(update={"wake_ms": 3.0})
    result = simulated(arrivals, sizes(), waking)
    assert result.latencies_s == pytest.approx([0.013, 0.023 - 0.005, 0.013])


GROWN = {"rate": 20.0, "lengths": [960, 960], "rules_a_check": [1, 1], "rules": 1}


def planned(runs: Path, **replaced: object) -> tuple[PlannedMethod, TrafficSource]:
    calibrated(runs)
    made, source = planned_traffic(plan(**replaced), runs)
    return deploy(made, runs).methods[0], source


def test_a_replica_saturates_where_its_work_fills_the_time(tmp_path: Path) -> None:
    method, traffic = planned(tmp_path)
    assert saturation(method, traffic) == pytest.approx(10.0, rel=0.01)  # 100 ms a check
    idle, busy = (at_rate(method, traffic, rate) for rate in (0.5, 8.0))
    assert idle.p50_ms == pytest.approx(100, rel=0.01) and idle.utilisation < 0.1
    assert busy.p95_ms > busy.p50_ms > idle.p50_ms
    assert busy.utilisation == pytest.approx(0.8, rel=0.1)


def test_replicas_are_as_many_as_keep_the_target_and_more_for_a_tighter_one(tmp_path: Path) -> None:
    method, traffic = planned(tmp_path)
    loose, tight = (capacity(method, traffic, p95_ms, 0.85) for p95_ms in (2000.0, 250.0))
    assert loose.rate is not None and tight.rate is not None and tight.within_target is not None
    assert loose.rate > tight.rate and tight.within_target.p95_ms <= 250
    assert loose.rate == pytest.approx(0.85 * loose.saturation_per_second)
    more, fewer = tight.replicas(20.0), loose.replicas(20.0)
    assert more is not None and fewer is not None and more > fewer >= 2
    # One replica less would have to take more than it can.
    assert 20.0 / (more - 1) > tight.rate >= 20.0 / more
    impossible = capacity(method, traffic, 90.0, 0.85)  # a lone check takes longer
    assert impossible.within_target is None and impossible.replicas(1.0) is None


def test_turns_hit_the_cache_and_a_replica_does_more_of_them(tmp_path: Path) -> None:
    _, once = planned(tmp_path, traffic=GROWN)
    method, often = planned(tmp_path, traffic=GROWN | {"turns": 6.0, "think_s": 20.0})
    assert saturation(method, often) > 2 * saturation(method, once)
    steady = at_rate(method, often, 2.0)
    assert steady.hit_rate > 0.4
    # Until as many conversations have begun as last at a time, less comes.
    whole = ReplicaSimulation(method).run(often.at(2.0).arrivals)
    assert steady.utilisation > 1.1 * whole.busy_s / whole.wall_s


def test_saturation_is_found_among_as_many_conversations_as_there_are_then(tmp_path: Path) -> None:
    """Between two turns of one they push it out of a cache that holds those of an idle hour."""
    method, often = planned(tmp_path, traffic=GROWN | {"turns": 6.0, "think_s": 20.0})
    small = replace(method, sizes=replace(method.sizes, cache_tokens=10_000))
    most = saturation(small, often)

    def answered_per_second(rate: float) -> float:
        return ReplicaSimulation(small).run(often.backlog(rate)).per_second

    assert most == pytest.approx(answered_per_second(most), rel=0.05)
    assert most < 0.7 * answered_per_second(1.0)
