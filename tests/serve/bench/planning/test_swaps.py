from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from guard.recipe import load_recipe
from serve.bench.planning.swaps import (
    CHECKS,
    FLEET,
    HOST,
    RULES_A_CHECK,
    SLOTS,
    WARM_UP,
    SwapRow,
    swap_rows,
    swaps_fitted,
)
from serve.bench.workload.random_adapter import by_name, random_adapters
from serve.engine import GuardEngine, Score, ScoreRequest
from serve.engine.score import EngineCounters
from tests.serve.bench.small_engine import small_recipe
from tests.serve.plan.on_paper import linear


def test_a_copy_and_a_read_are_told_apart() -> None:
    rows = []
    for number in range(30):
        swap_ins, loads = number % 4, number % 3
        wall_ms = 20.0 + 2.0 * swap_ins + 5.0 * loads
        rows.append(SwapRow(wall_ms=wall_ms, swap_ins=swap_ins, loads=loads))
    cost = swaps_fitted(rows, linear(tokens=1.0))
    assert (cost.swap_in_ms, cost.load_ms) == pytest.approx((2.0, 5.0))
    assert cost.step == linear(tokens=1.0).step


def test_a_cost_within_its_standard_error_is_not_told_from_zero() -> None:
    draw = random.Random(0)
    rows = []
    for number in range(40):
        swap_ins, loads = number % 4, number % 3
        wall_ms = 20.0 + 2.0 * swap_ins + draw.gauss(0, 1.0)  # a read costs nothing
        rows.append(SwapRow(wall_ms=wall_ms, swap_ins=swap_ins, loads=loads))
    cost = swaps_fitted(rows, linear(tokens=1.0))
    assert cost.swap_in_error_ms is not None and cost.load_error_ms is not None
    assert cost.swap_in_ms == pytest.approx(2.0, abs=3 * cost.swap_in_error_ms)
    assert 0.05 < cost.swap_in_error_ms < 0.4 and 0.05 < cost.load_error_ms < 0.5
    (indistinct,) = cost.indistinct
    assert indistinct.startswith(f"disk: {cost.load_ms:.2f} ms, standard error 0.")


class WarmingEngine:
    """Answers every request, and copies adapters only in its first check."""

    def __init__(self) -> None:
        self.checks = 0
        self.counters = EngineCounters()

    def forget(self) -> None: ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        self.counters = EngineCounters(swap_ins=100)
        self.checks += 1
        return [Score(0.5, 0, 1, 1.0) for _ in requests]


def test_the_first_checks_are_not_recorded() -> None:
    engine = WarmingEngine()
    recipe = load_recipe("tiny")
    rows = swap_rows(engine, recipe, recipe.sharing_method)  # type: ignore[arg-type]
    assert engine.checks == len(rows) + WARM_UP == CHECKS + WARM_UP
    assert {row.swap_ins for row in rows} == {0}


@pytest.mark.slow
def test_an_engine_with_few_slots_copies_and_reads() -> None:
    recipe = small_recipe()
    method = recipe.sharing_method
    with (
        random_adapters(recipe, [method], FLEET) as folders,
        GuardEngine(recipe, by_name(folders), max_loras=SLOTS, max_cpu_loras=HOST) as engine,
    ):
        rows = swap_rows(engine, recipe, method)
    assert len(rows) == CHECKS and all(row.wall_ms > 0 for row in rows)
    assert sum(row.swap_ins for row in rows) > CHECKS / 2
    assert 0 < sum(row.loads for row in rows) < CHECKS * RULES_A_CHECK
