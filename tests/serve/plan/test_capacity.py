from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serve.plan.build import planned_load
from serve.plan.capacity import (
    TrafficSource,
    at_rate,
    capacity,
    replay,
    saturation,
    trace_rate,
)
from serve.plan.deployment import PlannedMethod, deploy
from serve.plan.traffic import TrafficShape
from tests.serve.plan.deployments import calibrated, plan
from tests.serve.plan.on_paper import check


def planned(runs: Path, **replaced: object) -> tuple[PlannedMethod, TrafficSource]:
    calibrated(runs)
    made, load = planned_load(plan(**replaced), runs)
    return deploy(made, runs).methods[0], load.source


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
    assert loose.within_target is not None and tight.within_target is not None
    assert loose.within_target.rate > tight.within_target.rate
    assert tight.within_target.p95_ms <= 250
    assert loose.within_target.rate == pytest.approx(0.85 * loose.saturation_per_second)
    more, fewer = tight.replicas(20.0), loose.replicas(20.0)
    assert more is not None and fewer is not None and more > fewer >= 2
    # One replica less would have to take more than it can.
    assert 20.0 / (more - 1) > tight.within_target.rate >= 20.0 / more


def test_a_target_below_a_lone_check_is_reached_by_no_number(tmp_path: Path) -> None:
    method, traffic = planned(tmp_path)
    found = capacity(method, traffic, 90.0, 0.85)
    assert found.within_target is None and found.replicas(1.0) is None
    assert found.lone.p95_ms > 90


def test_turns_hit_the_cache_and_a_replica_does_more_of_them(tmp_path: Path) -> None:
    grown = {"rate": 20.0, "lengths": [960, 960], "rules_a_check": [1, 1], "rules": 1}
    _, once = planned(tmp_path, traffic=grown)
    method, often = planned(tmp_path, traffic=grown | {"turns": 6.0, "think_s": 1.0})
    assert saturation(method, often) > 2 * saturation(method, once)
    assert at_rate(method, often, 1.0).hit_rate > 0.4


def test_a_replica_is_at_work_by_what_comes_at_the_full_rate(tmp_path: Path) -> None:
    """Until as many conversations have begun as last at a time, less comes."""
    grown = {"rate": 20.0, "lengths": [960, 960], "rules_a_check": [1, 1], "rules": 1}
    method, often = planned(tmp_path, traffic=grown | {"turns": 6.0, "think_s": 20.0})
    drawn = often.at(2.0)
    whole = replay(method, drawn.arrivals)
    assert at_rate(method, often, 2.0).utilisation > 1.1 * whole.busy_s / whole.wall_s


def test_saturation_is_found_among_as_many_conversations_as_there_are_then(tmp_path: Path) -> None:
    """Between two turns of one they push it out of a cache that holds those of an idle hour."""
    grown = {"rate": 20.0, "lengths": [960, 960], "rules_a_check": [1, 1], "rules": 1}
    method, often = planned(tmp_path, traffic=grown | {"turns": 6.0, "think_s": 20.0})
    small = replace(method, sizes=replace(method.sizes, cache_tokens=10_000))
    most = saturation(small, often)
    assert most == pytest.approx(replay(small, often.backlog(most)).per_second, rel=0.05)
    assert most < 0.7 * replay(small, often.backlog(1.0)).per_second


def test_a_trace_is_stretched_to_the_rate() -> None:
    trace = tuple(check(due_s, 100, session=number) for number, due_s in enumerate((0, 1, 4)))
    source = TrafficSource(TrafficShape((1, 1), (1, 1), 1), 10, 0, trace)
    assert trace_rate(trace) == pytest.approx(0.75)
    drawn = source.at(1.5)
    assert [arrival.due_s for arrival in drawn.arrivals] == pytest.approx([0, 0.5, 2])
    assert {arrival.due_s for arrival in source.backlog(1.5)} == {0.0}


def test_adapters_without_a_slot_lower_the_rate(tmp_path: Path) -> None:
    traffic = {"rate": 5.0, "lengths": [97, 97], "rules_a_check": [4, 4], "rules": 40}
    method, source = planned(tmp_path, traffic=traffic | {"zipf": 0.0})
    few = replace(method.sizes, limits=replace(method.sizes.limits, slots=8))
    swapping = replace(method, sizes=few)
    assert saturation(swapping, source) < 0.95 * saturation(method, source)
    assert at_rate(swapping, source, 1.0).swap_ins > 2
