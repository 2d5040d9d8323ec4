"""The planner held to a small load on the real engine; how near it comes is for a quiet machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.layout import ROOT
from guard.recipe import load_recipe
from serve.bench.planning import validate
from serve.bench.planning.validate import (
    PlannedReplica,
    PlanValidation,
    RateRow,
    _drift,
    as_planned,
    draw,
    run,
    table,
)
from serve.bench.workload.arrivals import arrivals
from serve.plan.device.calibration import BurstRow, load_calibration
from tests.serve.bench.drawn import drawn, lines_of, points_of
from tests.serve.bench.small_engine import small_recipe
from tests.serve.cards import prompts
from tests.serve.plan.deployments import calibrated


def kept(name: str) -> PlanValidation:
    return PlanValidation.load(ROOT / "docs" / "benchmarks" / "serving" / f"{name}.json")


def row(measured: float, planned: float) -> RateRow:
    fields = {}
    for percent in ("p50", "p95"):
        fields[f"measured_{percent}_ms"] = measured
        for by in ("replayed", "filed", "drawn"):
            fields[f"{by}_{percent}_ms"] = planned
    return RateRow(offered_per_second=1.0, **fields)


def test_a_row_says_how_far_the_planner_is_off() -> None:
    assert row(100, 80).error("p50") == pytest.approx(-0.2)
    assert row(100, 119).is_within_aim() and not row(100, 121).is_within_aim()


@pytest.mark.parametrize(
    ("name", "planned", "filed", "drawn"),
    [
        ("plan_tiny_1core_amd", 5, 5, 3),
        ("plan_tiny_1core", 4, 4, 3),
        ("plan_tiny_2cores", 2, 2, 2),
    ],
)
def test_the_table_counts_the_rates_within_the_aim_by_every_prediction(
    name: str, planned: int, filed: int, drawn: int
) -> None:
    lines = table(kept(name)).splitlines()
    counted = [line.partition(" rates within")[0] for line in lines if "rates within" in line]
    assert counted == [
        f"planned: {planned} of 5",
        f"by the calibration's file: {filed} of 5",
        f"drawn by the planner: {drawn} of 5",
    ]


def test_the_plot_has_measured_and_planned_percentiles_at_every_rate(tmp_path: Path) -> None:
    validation = kept("plan_tiny_1core_amd")
    (axes,) = drawn(draw, validation, tmp_path / "plan_bench.png").axes
    expected: dict[str, list[tuple[float, float]]] = {}
    for percent in ("p50", "p95"):
        for label, by in (("measured", "measured"), ("planned", "replayed")):
            points = [
                (row.offered_per_second, getattr(row, f"{by}_{percent}_ms"))
                for row in validation.rows
            ]
            expected[f"{percent}, {label}"] = points
    assert {label: points_of(line) for label, line in lines_of(axes).items()} == expected


def test_a_calibration_of_another_model_is_refused(tmp_path: Path) -> None:
    calibration = load_calibration(calibrated(tmp_path))
    with pytest.raises(GuardError, match="of another model"):
        run(load_recipe("qwen3-4b"), calibration, "alora")


def test_the_simulation_reads_the_loads_own_tokens_and_times() -> None:
    drawn = arrivals(prompts(), 5.0, 20, seed=3)
    planned = as_planned(prompts(), drawn)
    assert [arrival.due_s for arrival in planned] == [arrival.due_s for arrival in drawn]
    for arrival, of_load in zip(planned, drawn, strict=True):
        assert arrival.tokens == len(prompts().prefix_ids(of_load.messages))
        assert arrival.rules == of_load.rules
    assert len({arrival.session for arrival in planned}) == 20


def burst(tokens: int, steps_ms: float) -> BurstRow:
    """A check of so many tokens, computed in one step."""
    return BurstRow(
        method="alora",
        checks=1,
        conversation_tokens=tokens,
        rules=1,
        submit_ms=1.0,
        steps_ms=steps_ms,
        steps=1,
        work={"steps": 1, "tokens": tokens},
    )


def test_the_drift_is_how_much_longer_the_median_burst_took_than_the_file_predicts(
    tmp_path: Path,
) -> None:
    cost = load_calibration(calibrated(tmp_path)).cost("alora")  # a millisecond a token
    assert _drift([burst(100, 150.0), burst(200, 260.0), burst(100, 900.0)], cost) == 0.5
    assert _drift([burst(100, 25.0)], cost) == -0.75


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> PlanValidation:
    calibration = load_calibration(calibrated(tmp_path_factory.mktemp("runs")))
    return run(small_recipe(), calibration, "alora", checks=12, repeats=1)


@pytest.mark.slow
def test_five_rates_are_measured_and_simulated(report: PlanValidation) -> None:
    assert len(report.rows) == len(validate.SHARES) == 5
    rates = [row.offered_per_second for row in report.rows]
    assert rates == sorted(rates) and rates[-1] < report.saturation_per_second
    for measured in report.rows:
        assert 0 < measured.measured_p50_ms <= measured.measured_p95_ms
        assert 0 < measured.replayed_p50_ms <= measured.replayed_p95_ms
    assert sum(report.cost.step.values()) > 0
    assert "rates within" in table(report)


@pytest.mark.slow
def test_the_report_is_kept_and_drawn(report: PlanValidation, tmp_path: Path) -> None:
    report.save(tmp_path / "plan_bench.json")
    assert PlanValidation.load(tmp_path / "plan_bench.json") == report
    draw(report, tmp_path / "plan_bench.png")
    assert (tmp_path / "plan_bench.png").read_bytes().startswith(b"\x89PNG")


def test_an_idle_replica_answers_as_fast_as_the_work_allows(tmp_path: Path) -> None:
    calibration = load_calibration(calibrated(tmp_path))
    replica = PlannedReplica(calibration.engine, calibration.cost("alora"), "alora")
    drawn = replica.drawn(0.1)
    assert drawn.percentile_ms(50) == pytest.approx(300 + 12 * 3, rel=0.15)
