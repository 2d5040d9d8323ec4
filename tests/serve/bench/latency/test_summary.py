"""Rows from repeats: medians with their spread, ratios of the repeats, marginal costs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from serve.bench.latency.grid import Cell
from serve.bench.latency.measure import LatencySample, LowerBound, Repeat
from serve.bench.latency.summary import cell_rows, marginal_costs, ratio_row


def sample(wall_ms: float, latencies_ms: Sequence[float] = (1.0, 2.0, 3.0)) -> LatencySample:
    return LatencySample(wall_ms, wall_ms / 2, tuple(latencies_ms), 10, 100, 0)


def repeat_of(base: float, lora: float, alora: float, bound: float) -> Repeat:
    samples = {"base": sample(base), "lora": sample(lora), "alora": sample(alora)}
    return Repeat(samples, 100, LowerBound(bound, bound / 4, 100))


REPEATS = [repeat_of(10, 100, 20, 8), repeat_of(11, 300, 30, 10), repeat_of(12, 200, 10, 12)]


def test_a_cell_is_summed_up_by_medians_with_their_spread() -> None:
    rows = cell_rows(Cell(1000, 5, 3), REPEATS, {"base": 25, "lora": 3, "alora": 3})
    assert [row.mode for row in rows] == ["base", "lora", "alora"]
    assert [row.suffix_tokens for row in rows] == [25, 3, 3]
    alora = rows[2]
    assert (alora.wall_ms.median, alora.wall_ms.min, alora.wall_ms.max) == (20, 10, 30)
    assert (alora.wall_ms.p95, alora.engine_ms) == (None, 10)  # three repeats have no p95
    # Of nine requests, not of three
    assert (alora.mean_ms, alora.p50_ms, alora.p95_ms) == (2.0, 2.0, 3.0)


def test_of_twenty_repeats_there_is_a_p95_and_of_fewer_there_is_none() -> None:
    repeats = [repeat_of(10, 100, float(wall), 8) for wall in range(1, 21)]
    suffixes = {"base": 25, "lora": 3, "alora": 3}
    for count, p95 in ((20, 19.05), (19, None)):
        alora = cell_rows(Cell(1000, 5, count), repeats[:count], suffixes)[2]
        assert alora.wall_ms.p95 == p95


def test_ratios_are_those_of_each_repeat() -> None:
    ratio = ratio_row(Cell(1000, 5, 3), REPEATS)
    speedup, engine = ratio.lora_over_alora, ratio.alora_engine_over_lower_bound
    assert speedup is not None and engine is not None
    assert (speedup.median, speedup.min, speedup.max) == (10, 5, 20)
    assert (ratio.lower_bound_ms, ratio.lower_bound_engine_ms) == (10, 2.5)
    assert ratio.alora_over_lower_bound == 20 / 8  # of 20 / 8, 30 / 10, 10 / 12
    assert (engine.median, engine.min, engine.max) == (10 / 2, 5 / 3, 15 / 2.5)


@pytest.mark.parametrize(("mode", "has_bound"), [("lora", True), ("alora", False)])
def test_without_a_method_its_ratios_are_missing(mode: str, has_bound: bool) -> None:
    samples = {name: taken for name, taken in REPEATS[0].samples.items() if name != mode}
    repeat = Repeat(samples, 100, REPEATS[0].lower_bound)
    ratio = ratio_row(Cell(1000, 5, 1), [repeat])
    assert ratio.lora_over_alora is None
    assert (ratio.alora_over_lower_bound is not None) == has_bound


def test_the_marginal_cost_is_the_median_over_pairs_with_its_interval() -> None:
    few = [repeat_of(1, 1, wall, 1) for wall in (100, 110, 90, 100, 100)]
    many = [repeat_of(1, 1, wall, 1) for wall in (150, 140, 190, 150, 150)]
    measured = {
        Cell(1000, 30, 3): many,
        Cell(1000, 10, 3): few,
        Cell(1000, 40, 3): many,
        Cell(5000, 1, 3): few,
    }
    first, second = marginal_costs(measured)
    assert (first.prompt_tokens, first.from_rules, first.to_rules) == (1000, 10, 30)
    assert (first.ms_per_rule, first.pairs) == (2.5, 5)  # of 2.5, 1.5, 5, 2.5 and 2.5
    assert (first.ms_low, first.ms_high) == (1.5, 5.0)
    assert (second.from_rules, second.to_rules, second.ms_per_rule) == (30, 40, 0.0)


def test_of_fewer_than_five_pairs_there_is_no_interval() -> None:
    repeats = [repeat_of(1, 1, wall, 1) for wall in (100, 110, 90, 100)]
    for pairs in (1, 4):
        measured = {Cell(1000, 1, 4): repeats, Cell(1000, 11, pairs): repeats[:pairs]}
        cost = marginal_costs(measured)[0]
        assert (cost.ms_per_rule, cost.pairs) == (0.0, pairs)
        assert cost.ms_low is None and cost.ms_high is None
