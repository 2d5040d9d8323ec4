"""The simulation against what queueing theory and arithmetic say."""

from __future__ import annotations

import numpy as np
import pytest

from serve.plan.replay.replica import ConversationCache, Replay, ReplicaSimulation, ReplicaSizes
from serve.plan.traffic import CheckArrival
from tests.serve.plan.on_paper import ByTokens, check, sizes

SERVICE_S = 0.01
CHECKS = 60_000


def simulated(
    arrivals: list[CheckArrival],
    of: ReplicaSizes,
    cost: ByTokens | None = None,
    suffix: int = 1,
    *,
    shares: bool = True,
) -> Replay:
    return ReplicaSimulation(of, cost or ByTokens(), suffix, shares=shares).run(arrivals)


def one_by_one(tokens: np.ndarray, rate: float, seed: int) -> Replay:
    """Poisson arrivals at a replica whose steps hold one check; the work is in its tokens."""
    draw = np.random.default_rng(seed)
    due_s = draw.exponential(1 / rate, len(tokens)).cumsum()
    arrivals = [
        CheckArrival(float(due), number, int(size), (0,))
        for number, (due, size) in enumerate(zip(due_s, tokens, strict=True))
    ]
    one = sizes(step_tokens=10**9, max_sequences=1)
    return simulated(arrivals, one, ByTokens(token_ms=1e-3), suffix=1)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_mean_latency_of_constant_work_is_that_of_m_d_1(load: float) -> None:
    tokens = np.full(CHECKS, SERVICE_S * 1e6 - 1)
    result = one_by_one(tokens, load / SERVICE_S, seed=1)
    expected_s = SERVICE_S * (1 + load / (2 * (1 - load)))  # Pollaczek and Khinchine
    assert result.latencies_s.mean() == pytest.approx(expected_s, rel=0.05)
    assert result.busy_s / result.wall_s == pytest.approx(load, rel=0.03)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_mean_latency_of_exponential_work_is_that_of_m_m_1(load: float) -> None:
    draw = np.random.default_rng(7)
    tokens = np.maximum(0, draw.exponential(SERVICE_S * 1e6, CHECKS))
    result = one_by_one(tokens, load / SERVICE_S, seed=2)
    assert result.latencies_s.mean() == pytest.approx(SERVICE_S / (1 - load), rel=0.07)
    # Latencies of M/M/1 are exponential too.
    p95_s = -np.log(0.05) * SERVICE_S / (1 - load)
    assert result.percentile_ms(95) == pytest.approx(1000 * p95_s, rel=0.1)


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
    crowded = simulated(turns, sizes(cache=100))
    assert crowded.work.tokens == 50 + 30 + 60 + 90 + 4, "the second conversation evicts the first"
    assert crowded.cached_tokens == 50 and crowded.hit_rate == 50 / 280


def test_of_what_fills_the_cache_nothing_is_counted() -> None:
    turns = [check(0.0, 50), check(1.0, 30, session=1), check(2.0, 60)]
    replica = ReplicaSimulation(sizes(), ByTokens(), 1, shares=True)
    result = replica.run(turns, warm_up=1)
    assert len(result.latencies_s) == 2 and result.work.tokens == 30 + 1 + 10 + 1
    assert result.hit_rate == 50 / 90
    assert result.busy_s == pytest.approx(0.042) and result.wall_s == pytest.approx(1.011)


def test_a_recorded_hit_counts_instead_of_what_the_simulation_holds() -> None:
    recorded = [check(0.0, 50), check(1.0, 50)._replace(cached_tokens=10)]
    assert simulated(recorded, sizes()).work.tokens == 50 + 40 + 2


def test_a_recorded_hit_says_nothing_of_rules_that_do_not_share_conversations() -> None:
    """Else a plan gives LoRA the cache of the aLoRA server whose log it reads."""
    recorded = [check(0.0, 50, session=0), check(1.0, 50, session=1)._replace(cached_tokens=48)]
    assert simulated(recorded, sizes(), shares=False).work.tokens == 50 + 50 + 2


def test_adapters_without_a_slot_cost_their_copies_and_reads() -> None:
    few = sizes(adapters=4, host=2, slots=1)
    arrivals = [CheckArrival(float(number), number, 9, (number % 4,)) for number in range(8)]
    cost = ByTokens(swap_in_ms=5.0, load_ms=7.0)
    result = simulated(arrivals, few, cost)
    work = result.work
    assert work.swap_ins > 0 and work.loads > 0
    assert result.busy_s == pytest.approx((80 + 5 * work.swap_ins + 7 * work.loads) / 1000)


def test_no_more_checks_are_open_than_the_server_opens() -> None:
    arrivals = [check(0.0, 9, session=number) for number in range(4)]
    free = simulated(arrivals, sizes())
    assert free.latencies_s == pytest.approx([0.04] * 4), "one step for all"
    one = sizes()
    narrow = ReplicaSizes(one.limits, one.cache_tokens, one.adapters, 50, max_open=1)
    assert simulated(arrivals, narrow).latencies_s == pytest.approx([0.01, 0.02, 0.03, 0.04])


def test_the_scaffold_is_held_for_every_conversation_once_there_was_one() -> None:
    cache = ConversationCache(capacity=1000, block_size=32, scaffold=32)
    assert cache.held(0) == 0
    cache.put(0, 100, 1)
    assert cache.held(0) == 96 and cache.held(1) == 32


def test_the_conversation_used_least_recently_goes_first() -> None:
    cache = ConversationCache(capacity=100, block_size=1)
    for session in (0, 1, 0, 2):
        cache.put(session, 40, 1)
    assert [cache.held(session) for session in range(3)] == [40, 0, 40]
    cache.put(3, 30, 3)  # a copy a rule
    assert [cache.held(session) for session in range(4)] == [0, 0, 0, 30]


def test_a_check_that_finds_the_engine_asleep_takes_longer_and_no_other() -> None:
    arrivals = [check(0.0, 9), check(0.005, 9, session=1), check(1.0, 9, session=2)]
    result = simulated(arrivals, sizes(), ByTokens(wake_ms=3.0))
    assert result.latencies_s == pytest.approx([0.013, 0.023 - 0.005, 0.013])
