"""A small calibration on the real engine, a plan made of it, and each of its measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from guard.recipe import load_recipe
from serve.bench.calibrate import (
    LONGEST,
    MOST_TOKENS,
    RULES_A_CHECK,
    SWAP_CHECKS,
    SWAP_WARM_UP,
    CalibrationReport,
    SwapRow,
    draw_bursts,
    scaffold_tokens,
    swap_rows,
    table,
    wake_ms,
    with_swaps,
)
from serve.engine import Score, ScoreRequest
from serve.engine.score import EngineCounters
from serve.plan.calibration import FittedCost, load_calibration
from serve.plan.report import build
from tests.serve.bench.small_engine import small_recipe
from tests.serve.bench.toy_bench import bench_on
from tests.serve.cards import prompts
from tests.serve.plan.on_paper import linear, plan


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


BURSTS, RULES = 9, 4


@dataclass(frozen=True)
class Calibrated:
    """A calibration, and what was measured of copies and reads, by method."""

    report: CalibrationReport
    swaps: list[list[SwapRow]]


@pytest.fixture(scope="module")
def calibrated() -> Calibrated:
    swaps: list[list[SwapRow]] = []

    def noted(rows: list[SwapRow], cost: FittedCost) -> FittedCost:
        swaps.append(rows)
        return with_swaps(rows, cost)

    words = ["--bursts", str(BURSTS), "--rules", str(RULES)]
    small = small_recipe(max_num_batched_tokens=512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve.bench.calibrate.WAKES", 3)
        patch.setattr("serve.bench.calibrate.with_swaps", noted)
        bench = bench_on("calibrate", Path("runs"), *words, recipe=small)
        return Calibrated(bench.calibrated(), swaps)


@pytest.mark.slow
def test_the_planners_scheduler_counts_the_engines_steps(calibrated: Calibrated) -> None:
    report = calibrated.report
    assert len(report.bursts) == BURSTS + BURSTS // 3
    for row in report.bursts:
        assert row.steps == row.work["steps"], row
        assert row.steps_ms > 0 and row.submit_ms > 0


@pytest.mark.slow
def test_every_method_has_coefficients_that_give_its_bursts_back(calibrated: Calibrated) -> None:
    report = calibrated.report
    assert set(report.methods) == {"lora", "alora"}
    for cost in report.methods.values():
        assert min(*cost.step.values(), *cost.submit.values()) >= 0
        assert sum(cost.step.values()) > 0
        assert cost.error < 0.9  # of a busy machine's bursts; who predicts nothing is off by 1
    assert report.engine.step_tokens == 512 and report.engine.suffix_tokens == 3
    assert report.engine.scaffold_tokens % report.engine.block_size == 0
    assert "bursts" in table(report)


@pytest.mark.slow
def test_an_engine_with_few_slots_copies_and_reads(calibrated: Calibrated) -> None:
    assert len(calibrated.swaps) == 2
    for rows in calibrated.swaps:
        assert len(rows) == SWAP_CHECKS and all(row.wall_ms > 0 for row in rows)
        assert sum(row.swap_ins for row in rows) > SWAP_CHECKS / 2
        assert 0 < sum(row.loads for row in rows) < SWAP_CHECKS * RULES_A_CHECK


@pytest.mark.slow
def test_a_plan_is_made_of_it(calibrated: Calibrated, tmp_path: Path) -> None:
    calibrated.report.save(tmp_path / "calibration.json")
    methods = load_calibration(tmp_path / "calibration.json").methods
    assert methods == calibrated.report.methods
    traffic = {"lengths": [100, 300], "rules_a_check": [2, 6], "rules": 6, "rate": 5.0}
    planned = build(plan(traffic=traffic, p95_ms=60_000.0), tmp_path)
    for label in ("aLoRA", "LoRA"):
        assert planned.rows("one replica")[label]["saturates at"].value > 0
        assert planned.rows("coefficients")[label]["1,000 tokens"].basis == "measured here"
