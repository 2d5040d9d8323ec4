"""A small calibration on the real engine, a plan made of it, and each of its measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from serve.bench import calibrate
from serve.bench.calibrate import (
    LONGEST,
    MOST_TOKENS,
    CalibrationReport,
    SwapRow,
    draw_bursts,
    table,
    with_swaps,
)
from serve.plan.calibration import FittedCost, load_calibration
from serve.plan.report import build
from tests.serve.bench.small_engine import small_recipe
from tests.serve.bench.toy_bench import bench_on
from tests.serve.plan.on_paper import figures, linear, plan


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


def test_a_copy_is_told_from_the_rest() -> None:
    rows = [SwapRow(wall_ms=20.0 + 2.0 * swap_ins, swap_ins=swap_ins) for swap_ins in range(4)]
    cost = with_swaps(rows, linear(tokens=1.0))
    assert cost.swap_in_ms == pytest.approx(2.0)
    assert cost.step == linear(tokens=1.0).step


BURSTS, RULES = 6, 4
# Of what is measured, less: the tokens of a conversation and a burst, and how often.
SMALL: dict[str, Any] = {"LONGEST": 800, "MOST_TOKENS": {True: 2_000, False: 3_000}, "WARM_UP": 1}
SMALL |= {"WAKES": 1, "SWAP_CHECKS": 12, "SWAP_WARM_UP": 1, "FLEET": 12}


@pytest.fixture(scope="module")
def swaps() -> list[list[SwapRow]]:
    """What was measured of copies and reads, by method."""
    return []


@pytest.fixture(scope="module")
def report(swaps: list[list[SwapRow]]) -> CalibrationReport:
    def noted(rows: list[SwapRow], cost: FittedCost) -> FittedCost:
        swaps.append(rows)
        return with_swaps(rows, cost)

    words = ["--bursts", str(BURSTS), "--rules", str(RULES)]
    small = small_recipe(max_num_batched_tokens=512)
    with MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(calibrate, name, value)
        patch.setattr(calibrate, "with_swaps", noted)
        return bench_on("calibrate", Path("runs"), *words, recipe=small).calibrated()


@pytest.mark.slow
def test_every_method_has_coefficients_that_give_its_bursts_back(report: CalibrationReport) -> None:
    """The planner's scheduler counts the engine's steps."""
    assert len(report.bursts) == BURSTS + BURSTS // 3
    for row in report.bursts:
        assert row.steps == row.work["steps"], row
        assert row.steps_ms > 0 and row.submit_ms > 0
    assert set(report.methods) == {"lora", "alora"}
    for cost in report.methods.values():
        assert min(*cost.step.values(), *cost.submit.values()) >= 0
        assert sum(cost.step.values()) > 0
        assert cost.error < 0.9  # of a busy machine's bursts; who predicts nothing is off by 1
    assert report.suffix_tokens == 3 and report.scaffold_tokens % 32 == 0
    assert "bursts" in table(report)


@pytest.mark.slow
def test_few_slots_copy(report: CalibrationReport, swaps: list[list[SwapRow]]) -> None:
    assert len(swaps) == len(report.methods)
    for rows in swaps:
        assert len(rows) == SMALL["SWAP_CHECKS"] and all(row.wall_ms > 0 for row in rows)
        assert sum(row.swap_ins for row in rows) > SMALL["SWAP_CHECKS"] / 2


@pytest.mark.slow
def test_a_plan_is_made_of_it(report: CalibrationReport, tmp_path: Path) -> None:
    report.save(tmp_path / "calibration.json")
    assert load_calibration(tmp_path / "calibration.json").methods == report.methods
    traffic = {"lengths": [100, 300], "rules_a_check": [2, 6], "rules": 6, "rate": 5.0}
    planned = build(plan(traffic=traffic, p95_ms=60_000.0), tmp_path)
    for label in ("aLoRA", "LoRA"):
        assert figures(planned, "one replica")[label]["saturates at, checks/s"] > 0
