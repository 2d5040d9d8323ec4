"""What the planner's coefficients are fitted to: bursts, pauses, copies into slots and reads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from guard.recipe import load_recipe
from serve.bench.planning import (
    FLEET,
    HOST,
    LONGEST,
    MOST_TOKENS,
    RULES_A_CHECK,
    SLOTS,
    SWAP_CHECKS,
    SWAP_WARM_UP,
    SwapRow,
    draw_bursts,
    scaffold_tokens,
    swap_rows,
    wake_ms,
    with_swaps,
)
from serve.bench.workload.adapters import random_adapters
from serve.engine import GuardEngine, Score, ScoreRequest
from serve.engine.score import EngineCounters
from tests.serve.bench.small_engine import small_recipe
from tests.serve.cards import prompts
from tests.serve.plan.on_paper import linear


def test_bursts_are_of_all_sizes_and_not_too_large() -> None:
    for shares in (True, False):
        drawn = draw_bursts(60, 64, seed=1, shares=shares)
        assert drawn == draw_bursts(60, 64, seed=1, shares=shares)
        for burst in drawn:
            tokens = [tokens * (1 if shares else rules) for tokens, rules in burst]
            assert sum(tokens) <= MOST_TOKENS[shares] + LONGEST
        sizes = {len(burst) for burst in drawn}
        assert 1 in sizes and max(sizes) >= 3
        assert max(rules for burst in drawn for _, rules in burst) > 30


def test_all_conversations_begin_with_the_same_whole_blocks() -> None:
    assert load_recipe("tiny").engine["block_size"] == 32
    held = scaffold_tokens(prompts(), 8)
    assert held % 8 == 0 and 0 < held < 64
    assert scaffold_tokens(prompts(), 4096) == 0


def test_what_a_pause_costs_is_the_median_difference_and_never_below_nothing() -> None:
    def cost(*pairs: tuple[float, float]) -> float:
        times = iter([time for pair in pairs * 5 for time in pair])

        class Meter:
            most_rules = 5

            def run(self, plan: object, pause_s: float = 0.0) -> Any:
                return SimpleNamespace(submit_ms=1.0, steps_ms=next(times) - 1.0)

        return wake_ms(Meter())  # type: ignore[arg-type]

    assert cost((30.0, 25.0), (90.0, 25.0), (28.0, 27.0)) == 5.0
    assert cost((20.0, 25.0), (20.0, 25.0), (20.0, 25.0)) == 0.0


def test_a_copy_and_a_read_are_told_apart() -> None:
    rows = []
    for number in range(30):
        swap_ins, loads = number % 4, number % 3
        wall_ms = 20.0 + 2.0 * swap_ins + 5.0 * loads
        rows.append(SwapRow(wall_ms=wall_ms, swap_ins=swap_ins, loads=loads))
    cost = with_swaps(rows, linear(tokens=1.0))
    assert (cost.swap_in_ms, cost.load_ms) == pytest.approx((2.0, 5.0))
    assert cost.step == linear(tokens=1.0).step


def test_a_cost_within_its_standard_error_is_not_told_from_zero() -> None:
    draw = random.Random(0)
    rows = []
    for number in range(40):
        swap_ins, loads = number % 4, number % 3
        wall_ms = 20.0 + 2.0 * swap_ins + draw.gauss(0, 1.0)  # a read costs nothing
        rows.append(SwapRow(wall_ms=wall_ms, swap_ins=swap_ins, loads=loads))
    cost = with_swaps(rows, linear(tokens=1.0))
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
    assert engine.checks == len(rows) + SWAP_WARM_UP == SWAP_CHECKS + SWAP_WARM_UP
    assert {row.swap_ins for row in rows} == {0}


@pytest.mark.slow
def test_an_engine_with_few_slots_copies_and_reads() -> None:
    recipe = small_recipe()
    method = recipe.sharing_method
    with (
        random_adapters(recipe, [method], FLEET) as adapters,
        GuardEngine(recipe, adapters, max_loras=SLOTS, max_cpu_loras=HOST) as engine,
    ):
        rows = swap_rows(engine, recipe, method)
    assert len(rows) == SWAP_CHECKS and all(row.wall_ms > 0 for row in rows)
    assert sum(row.swap_ins for row in rows) > SWAP_CHECKS / 2
    assert 0 < sum(row.loads for row in rows) < SWAP_CHECKS * RULES_A_CHECK
