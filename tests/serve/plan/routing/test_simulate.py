from __future__ import annotations

import numpy as np
import pytest

from serve.plan.routing.ring import HashRing, RoundRobin, Router
from serve.plan.routing.simulate import FleetSimulation, ReplicaRoom, RoutingOutcome
from serve.plan.routing.turns import TurnArrivals, draw_turns
from serve.plan.traffic.generate import TrafficShape

ROOM = ReplicaRoom(cache_tokens=10**9, block_size=1, max_ongoing=1000)
SHAPE = TrafficShape((200, 200), (1, 1), 1, turns=4.0, think_s=1.0)
REPLICAS = 20


def by_new_tokens(tokens: int, cached: int, rules: int) -> float:
    return (tokens - cached) * 1e-5


def simulated(
    router: Router,
    turns: TurnArrivals,
    room: ReplicaRoom = ROOM,
    churn: float = 0.0,
    replicas: int = REPLICAS,
    *,
    shares: bool = True,
) -> RoutingOutcome:
    simulation = FleetSimulation(replicas, room, by_new_tokens, router, churn, shares=shares)
    return simulation.run(turns)


@pytest.fixture(scope="module")
def turns() -> TurnArrivals:
    return draw_turns(SHAPE, conversations_per_second=50.0, seconds=60.0, seed=0)


def replicas() -> list[int]:
    return list(range(REPLICAS))


def test_without_churn_a_session_stays_and_all_that_it_had_is_there(turns: TurnArrivals) -> None:
    outcome = simulated(HashRing(replicas()), turns)
    assert outcome.affinity == 1.0 and outcome.hit_rate == pytest.approx(1.0, abs=0.01)
    assert outcome.refused == 0 and outcome.counted > 5000


def test_round_robin_stays_by_chance_alone(turns: TurnArrivals) -> None:
    outcome = simulated(RoundRobin(replicas()), turns)
    assert outcome.affinity == pytest.approx(1 / REPLICAS, abs=0.02)
    affine = simulated(HashRing(replicas()), turns)
    assert outcome.hit_rate < 0.3 and outcome.p50_ms > affine.p50_ms
    assert outcome.utilisation > affine.utilisation


def test_churn_costs_affinity_the_share_that_is_replaced_between_two_turns(
    turns: TurnArrivals,
) -> None:
    # Pauses of a second: of 30 replicas replaced a minute, half a replica is between two turns.
    outcome = simulated(HashRing(replicas()), turns, churn=1.5)
    assert outcome.affinity == pytest.approx(1 - 2 * 0.5 / REPLICAS, abs=0.025)
    assert 0.9 < outcome.hit_rate < 1.0


def test_a_cache_too_small_for_all_evicts(turns: TurnArrivals) -> None:
    small = ReplicaRoom(cache_tokens=600, block_size=1, max_ongoing=1000)
    assert simulated(HashRing(replicas()), turns, room=small).hit_rate < 0.8


def test_rules_that_do_not_share_a_conversation_fill_the_cache_with_a_copy_each() -> None:
    shape = TrafficShape((200, 200), (3, 3), 3, turns=4.0, think_s=1.0)
    of_three_rules = draw_turns(shape, conversations_per_second=50.0, seconds=60.0, seed=0)
    for_twenty = ReplicaRoom(cache_tokens=20 * 200, block_size=1, max_ongoing=1000)
    for_sixty = ReplicaRoom(cache_tokens=3 * 20 * 200, block_size=1, max_ongoing=1000)
    shared = simulated(HashRing(replicas()), of_three_rules, for_twenty)
    own = simulated(HashRing(replicas()), of_three_rules, for_twenty, shares=False)
    roomy = simulated(HashRing(replicas()), of_three_rules, for_sixty, shares=False)
    assert own.hit_rate < shared.hit_rate - 0.1
    assert roomy.hit_rate == shared.hit_rate


def first_turns(due_s: list[float], counted_from_s: float = 0.0) -> TurnArrivals:
    """First turns of one session's hash."""
    count = len(due_s)
    hashes, tokens = np.full(count, 7, np.uint64), np.full(count, 100_000)
    earlier, rules = np.zeros(count, int), np.ones(count, int)
    return TurnArrivals(np.asarray(due_s), hashes, tokens, earlier, rules, counted_from_s)


def at_once(count: int) -> TurnArrivals:
    """So many of them, all at time 0."""
    return first_turns([0.0] * count)


def of_a_second_each(
    router: Router, max_ongoing: int = 1000, replicas: int = REPLICAS
) -> FleetSimulation:
    """Replicas that take a second for every check."""
    room = ReplicaRoom(10**9, 1, max_ongoing)
    return FleetSimulation(replicas, room, lambda *_: 1.0, router, 0.0, shares=True)


def test_a_full_replica_refuses_and_the_next_two_take_over() -> None:
    outcome = of_a_second_each(HashRing(replicas()), max_ongoing=1).run(at_once(3))
    assert outcome.refused == pytest.approx(2 / 3)
    assert outcome.p95_ms == pytest.approx(1000), "three replicas, side by side"


def test_where_all_three_are_full_a_turn_waits_and_tries_again() -> None:
    outcome = of_a_second_each(HashRing(replicas()), max_ongoing=1).run(at_once(4))
    assert outcome.counted == 4
    # Pauses of 25, 50, 100, 200, 400 and 500 ms end after the first second.
    assert outcome.p95_ms == pytest.approx(np.percentile([1000, 1000, 1000, 2275], 95))


def test_a_replica_works_off_its_queue_in_order() -> None:
    outcome = of_a_second_each(RoundRobin([0]), replicas=1).run(at_once(4))
    assert outcome.p50_ms == pytest.approx(2500) and outcome.busiest == 1.0


def test_of_what_fills_the_caches_no_time_at_work_and_no_refusal_is_counted() -> None:
    simulation = of_a_second_each(RoundRobin([0]), max_ongoing=2, replicas=1)
    # The first two keep it at work until 2 s, and the third is refused at first. From 1.5 s to the
    # end at 11 s it works on the second for half a second, then on the three that are left.
    outcome = simulation.run(first_turns([0.0, 0.0, 0.1, 9.0, 9.0], counted_from_s=1.5))
    assert (outcome.counted, outcome.refused) == (2, 0.0)
    assert outcome.utilisation == pytest.approx((0.5 + 1 + 2) / (11 - 1.5))


def test_the_busiest_replica_is_compared_with_those_that_lived_as_long(
    turns: TurnArrivals,
) -> None:
    calm = simulated(RoundRobin(replicas()), turns)
    assert calm.busiest == pytest.approx(1.0, abs=0.1)
    assert simulated(RoundRobin(replicas()), turns, churn=0.5).busiest < calm.busiest + 0.1
