"""The simulation, and the batches of its steps, against queueing theory and arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from serve.engine.backends.arguments import Sizes
from serve.plan.batching import AdapterSlots, ReplicaSizes, ScheduledStep, StepScheduler
from serve.plan.calibration import FittedCost
from serve.plan.deployment import PlannedMethod, deploy
from serve.plan.plan_file import Plan
from serve.plan.replica import (
    ConversationCache,
    Replay,
    ReplicaSimulation,
    at_rate,
    backlog,
    capacity,
    saturation,
)
from serve.plan.traffic import CheckArrival
from tests.serve.plan.on_paper import CALIBRATION, check, linear, plan, sizes

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
    draw = np.random.default_rng(7)
    tokens = np.maximum(0, draw.exponential(SERVICE_S * 1e6, CHECKS))
    exponential = one_by_one(tokens, load / SERVICE_S, seed=2)
    assert exponential.busy_s / exponential.wall_s == pytest.approx(load, rel=0.03)
    assert exponential.latencies_s.mean() == pytest.approx(SERVICE_S / (1 - load), rel=0.07)
    # Latencies of M/M/1 are exponential too.
    p95_s = -np.log(0.05) * SERVICE_S / (1 - load)
    assert exponential.p95_ms == pytest.approx(1000 * p95_s, rel=0.1)


def test_a_check_that_comes_during_a_step_waits_for_its_end_and_joins_the_next() -> None:
    arrivals = [check(0.0, 9), check(0.004, 4, session=1), check(0.005, 4, session=2)]
    result = simulated(arrivals, sizes())
    assert result.latencies_s == pytest.approx([0.010, 0.020 - 0.004, 0.020 - 0.005])
    assert result.work.steps == 2 and result.work.tokens == 10 + 2 * 5


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


def test_no_more_checks_are_open_than_the_server_opens() -> None:
    arrivals = [check(0.0, 9, session=number) for number in range(4)]
    free, one = simulated(arrivals, sizes()), simulated(arrivals, sizes(max_open=1))
    assert free.latencies_s == pytest.approx([0.04] * 4), "one step for all"
    assert one.latencies_s == pytest.approx([0.01, 0.02, 0.03, 0.04])


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


def planned(**replaced: object) -> tuple[PlannedMethod, Plan]:
    made = plan(**replaced)
    return deploy(made, CALIBRATION)[0], made


def test_a_replica_saturates_where_its_work_fills_the_time() -> None:
    method, made = planned()
    assert saturation(method, made) == pytest.approx(10.0, rel=0.01)  # 100 ms a check
    idle, busy = (at_rate(method, made, rate) for rate in (0.5, 8.0))
    assert idle.p50_ms == pytest.approx(100, rel=0.01) and idle.utilisation < 0.1
    assert busy.p95_ms > busy.p50_ms > idle.p50_ms
    assert busy.utilisation == pytest.approx(0.8, rel=0.1)


def test_replicas_are_as_many_as_keep_the_target_and_more_for_a_tighter_one() -> None:
    method, _ = planned()
    loose, tight, impossible = (
        capacity(method, plan(p95_ms=p95_ms)) for p95_ms in (2000.0, 250.0, 90.0)
    )
    assert loose.rate is not None and tight.rate is not None and tight.within_target is not None
    assert loose.rate > tight.rate and tight.within_target.p95_ms <= 250
    assert loose.rate == pytest.approx(0.85 * loose.saturation_per_second)
    more, fewer = tight.replicas(20.0), loose.replicas(20.0)
    assert more is not None and fewer is not None and more > fewer >= 2
    # One replica less would have to take more than it can.
    assert 20.0 / (more - 1) > tight.rate >= 20.0 / more
    # A lone check takes longer than 90 ms.
    assert impossible.within_target is None and impossible.replicas(1.0) is None


def test_saturation_is_found_among_as_many_conversations_as_there_are_then() -> None:
    """Between two turns of one they push it out of a cache that holds those of an idle hour."""
    method, often = planned(traffic=GROWN | {"turns": 6.0, "think_s": 20.0})
    small = replace(method, sizes=replace(method.sizes, cache_tokens=10_000))
    most = saturation(small, often)

    def answered_per_second(rate: float) -> float:
        return ReplicaSimulation(small).run(backlog(often, rate)).per_second

    assert most == pytest.approx(answered_per_second(most), rel=0.05)
    assert most < 0.7 * answered_per_second(1.0)


def steps_of(scheduler: StepScheduler) -> list[ScheduledStep]:
    steps = []
    while scheduler.is_busy:
        steps.append(scheduler.next_step())
    return steps


def test_aloras_compute_the_conversation_once_and_loras_once_a_rule() -> None:
    for shares, tokens in ((True, 40 + 3 * 5), (False, 3 * (40 + 5))):
        scheduler = StepScheduler(sizes(step_tokens=1000), 5, shares=shares)
        scheduler.submit(0, 40, 0, (0, 1, 2))
        [step] = steps_of(scheduler)
        assert step.work.tokens == tokens and step.work.sequences == 3
        assert step.answered == [(0, 3)]


def test_a_step_is_cut_at_its_tokens_and_the_rest_goes_on_in_the_next() -> None:
    scheduler = StepScheduler(sizes(step_tokens=30), 5, shares=True)
    scheduler.submit(0, 40, 0, (0, 1, 2))
    first, second = steps_of(scheduler)
    assert first.work.tokens == 30 and first.answered == [] and first.work.sequences == 1
    assert second.work.tokens == 25 and second.answered == [(0, 3)]
    # 40 tokens attend to those before them, the first rule's 5 too, each further rule's to 40 + 5.
    pairs = 45 * 45 / 2 + 2 * (5 * 40 + 5 * 5 / 2)
    assert first.work.pairs + second.work.pairs == pytest.approx(pairs)


def test_a_step_holds_so_many_sequences_and_adapters() -> None:
    many = StepScheduler(sizes(max_sequences=4, slots=3), 1, shares=True)
    many.submit(0, 10, 0, range(7))
    assert [len(step.adapters) for step in steps_of(many)] == [3, 3, 1]
    seats = StepScheduler(sizes(max_sequences=4), 1, shares=True)
    seats.submit(0, 10, 0, range(7))
    assert [step.work.sequences for step in steps_of(seats)] == [4, 3]


def test_what_the_cache_holds_is_not_computed_and_lets_a_check_go_ahead() -> None:
    scheduler = StepScheduler(sizes(step_tokens=50), 1, shares=True)
    scheduler.submit(0, 45, 0, (0,))
    scheduler.submit(1, 45, 40, (0,))
    first, second = steps_of(scheduler)
    assert first.answered == [(1, 1)] and second.answered == [(0, 1)]
    assert first.work.tokens + second.work.tokens == 45 + 1 + 5 + 1


def test_a_long_call_gives_way_after_a_quantum() -> None:
    """Rules of LoRAs beyond four full steps' tokens start behind a check that comes later."""
    scheduler = StepScheduler(sizes(step_tokens=10), 1, shares=False)
    scheduler.submit(0, 9, 0, range(8))
    scheduler.submit(1, 9, 0, (0,))
    answered = [step.answered[0][0] for step in steps_of(scheduler)]
    assert answered.index(1) == 4 and len(answered) == 9


def test_an_adapter_without_a_slot_is_copied() -> None:
    slots = AdapterSlots(sizes(adapters=4, slots=2))
    assert [slots.use(adapters) for adapters in ({0, 1}, {2}, {2})] == [0, 1, 0]
