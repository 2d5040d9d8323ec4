"""A small calibration on the real engine, a plan made of it, and each of its measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest import MonkeyPatch

from serve.bench import calibrate
from serve.bench.calibrate import (
    FEATURES,
    LONGEST,
    MOST_TOKENS,
    BurstRow,
    CalibrationReport,
    SwapRow,
    draw_bursts,
    fitted,
    non_negative,
    table,
    with_swaps,
)
from serve.plan.calibration import FittedCost, load_calibration
from serve.plan.run import build
from tests.serve.bench.small_engine import small_recipe
from tests.serve.bench.toy_bench import bench_on
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


def test_a_copy_is_told_from_the_rest() -> None:
    rows = [SwapRow(wall_ms=20.0 + 2.0 * swap_ins, swap_ins=swap_ins) for swap_ins in range(4)]
    cost = with_swaps(rows, linear(tokens=1.0))
    assert cost.swap_in_ms == pytest.approx(2.0)
    assert cost.step == linear(tokens=1.0).step


STEP = {"steps": 9.0, "tokens": 0.035, "pairs": 2e-5, "sequences": 0.3}
SUBMIT = {"checks": 0.3, "conversation_tokens": 0.002, "rules": 0.03}


def burst_row(draw: np.random.Generator, noise: float) -> BurstRow:
    work = {
        "steps": float(draw.integers(1, 5)),
        "tokens": float(draw.integers(100, 8000)),
        "pairs": float(draw.uniform(1e4, 2e7)),
        "sequences": float(draw.integers(1, 200)),
    }
    checks, tokens, rules = (int(draw.integers(1, most)) for most in (8, 8000, 200))
    submit_noise, steps_noise = draw.uniform(1 - noise, 1 + noise, 2)
    return BurstRow(
        method="alora",
        checks=checks,
        conversation_tokens=tokens,
        rules=rules,
        submit_ms=np.dot([*SUBMIT.values()], [checks, tokens, rules]) * submit_noise,
        steps_ms=sum(STEP[name] * work[name] for name in FEATURES) * steps_noise,
        work=work,
    )


def test_coefficients_are_found_again_in_bursts_with_noise() -> None:
    draw = np.random.default_rng(0)
    exact = fitted([burst_row(draw, 0.0) for _ in range(40)])
    assert exact.step == pytest.approx(STEP) and exact.submit == pytest.approx(SUBMIT)
    assert exact.error == pytest.approx(0, abs=1e-9)
    noisy = fitted([burst_row(draw, 0.1) for _ in range(400)])
    assert noisy.step == pytest.approx(STEP, rel=0.2)
    assert 0.03 < noisy.error < 0.08
    assert min(non_negative([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], [3.0, 2.0, 1.0])) >= 0


BURSTS, RULES = 6, 4
# Of what is measured, less: the tokens of a conversation and a burst, and how often.
SMALL: dict[str, Any] = {"LONGEST": 800, "MOST_TOKENS": {True: 2_000, False: 3_000}, "WARM_UP": 1}
SMALL |= {"WAKES": 1, "SWAP_CHECKS": 12, "SWAP_WARM_UP": 1, "FLEET": 12}
SMALL |= {"BURSTS": BURSTS, "RULES": RULES}


@pytest.fixture(scope="module")
def swaps() -> list[list[SwapRow]]:
    """What was measured of copies and reads, by method."""
    return []


@pytest.fixture(scope="module")
def report(swaps: list[list[SwapRow]]) -> CalibrationReport:
    def noted(rows: list[SwapRow], cost: FittedCost) -> FittedCost:
        swaps.append(rows)
        return with_swaps(rows, cost)

    small = small_recipe(max_num_batched_tokens=512)
    with MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(calibrate, name, value)
        patch.setattr(calibrate, "with_swaps", noted)
        return bench_on("calibrate", Path("runs"), recipe=small).calibrated()


@pytest.mark.slow
def test_every_method_has_coefficients_that_give_its_bursts_back(report: CalibrationReport) -> None:
    assert len(report.bursts) == BURSTS + BURSTS // 3
    for row in report.bursts:
        assert row.work["steps"] >= row.work["tokens"] / 512, "the limit of a step"
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
        assert planned.figures[label]["saturates at, checks/s"] > 0
