"""A small calibration on the real engine, and a plan made of it: end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.home import ROOT
from serve.bench.calibrate import CalibrationReport, table
from serve.plan.calibration import load_calibration
from serve.plan.report import build
from tests.serve.bench.small_engine import small_recipe
from tests.serve.bench.toy_bench import bench_on
from tests.serve.plan.on_paper import plan

pytestmark = pytest.mark.slow

BURSTS, RULES = 12, 6


@pytest.fixture(scope="module")
def report() -> CalibrationReport:
    words = ["--bursts", str(BURSTS), "--rules", str(RULES)]
    small = small_recipe(max_num_batched_tokens=512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve.bench.planning.WAKES", 3)
        bench = bench_on("calibrate", Path("runs"), *words, recipe=small)
        measured: CalibrationReport = bench.calibrated()
    return measured


def test_the_planners_scheduler_counts_the_engines_steps(report: CalibrationReport) -> None:
    assert len(report.bursts) == BURSTS + BURSTS // 3
    for row in report.bursts:
        assert row.steps == row.work["steps"], row
        assert row.steps_ms > 0 and row.submit_ms > 0


def test_every_method_has_coefficients_that_give_its_bursts_back(report: CalibrationReport) -> None:
    assert set(report.methods) == {"lora", "alora"}
    for cost in report.methods.values():
        assert min(*cost.step.values(), *cost.submit.values()) >= 0
        assert sum(cost.step.values()) > 0
        assert cost.error < 0.9  # of a busy machine's bursts; who predicts nothing is off by 1
    assert report.engine.step_tokens == 512 and report.engine.suffix_tokens == 3
    assert report.engine.scaffold_tokens % report.engine.block_size == 0
    assert "bursts" in table(report)


def test_the_table_names_a_time_that_is_not_told_from_zero() -> None:
    kept = ROOT / "docs" / "benchmarks" / "serving" / "calibration_tiny_1core_amd.json"
    report = CalibrationReport.load(kept)
    assert "not told from 0" not in table(report)
    unclear = report.methods["alora"].model_copy(update={"load_ms": 0.0, "load_error_ms": 0.4})
    methods = report.methods | {"alora": unclear}
    text = table(report.model_copy(update={"methods": methods}))
    line = "aLoRA: not told from 0 by its standard error: disk: 0.00 ms, standard error 0.40"
    assert line in text.splitlines()


def test_a_plan_is_made_of_it(report: CalibrationReport, tmp_path: Path) -> None:
    report.save(tmp_path / "calibration.json")
    assert load_calibration(tmp_path / "calibration.json").methods == report.methods
    traffic = {"lengths": [100, 300], "rules_a_check": [2, 6], "rules": 6, "rate": 5.0}
    planned = build(plan(traffic=traffic, p95_ms=60_000.0), tmp_path)
    replica = planned.section("one replica")
    assert replica.value("aLoRA", "saturates at") > 0
    assert replica.value("LoRA", "saturates at") > 0
    coefficients = planned.section("coefficients").rows[0].figures
    assert coefficients["1,000 tokens"].basis == "measured here"
