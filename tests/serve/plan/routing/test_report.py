from __future__ import annotations

from pathlib import Path

from serve.plan.routing.report import RoutingReport, RoutingRow, draw, table
from serve.plan.routing.ring import ROUTERS
from tests.serve.bench.drawn import drawn, lines_of, points_of


def row(router: str, turns: float, churn: float) -> RoutingRow:
    return RoutingRow(
        router=router,
        turns=turns,
        churn=churn,
        replicas=1000,
        affinity=0.98,
        hit_rate=0.875,
        p50_ms=20.0,
        p95_ms=34.5,
        utilisation=0.1,
        refused=0.0,
        busiest=1.2,
        counted=100,
    )


def report() -> RoutingReport:
    rows = []
    for turns in (2.0, 5.0):
        for churn in (0.0, 0.1):
            rows += [row(router, turns, churn) for router in ROUTERS]
    return RoutingReport(
        name="small",
        commit="c0ffee",
        hardware="a core",
        model="tiny",
        method="alora",
        source="measured here: a file",
        conversations_an_hour=1_000_000,
        think_s=10,
        max_ongoing=32,
        rows=tuple(rows),
    )


def test_a_row_a_run_and_what_was_simulated() -> None:
    lines = table(report()).splitlines()
    assert lines[2].split() == (
        [
            "1,000",
            "2",
            "0%",
            "consistent",
            "hash",
            "|",
            "98.0%",
            "87.5%",
            "20.0",
            "34.5",
            "10.0%",
            "0.00%",
            "1.20",
        ]
    )
    assert lines[-1].startswith("1,000,000 conversations an hour, a turn every 10 s")


def test_the_report_is_kept(tmp_path: Path) -> None:
    report().save(tmp_path / "new" / "routing.json")
    text = (tmp_path / "new" / "routing.json").read_text(encoding="utf-8")
    assert RoutingReport.model_validate_json(text) == report()


def test_hits_and_p95_are_drawn_for_every_router_and_churn_of_the_largest_fleet(
    tmp_path: Path,
) -> None:
    rows = []
    for number, template in enumerate(report().rows):
        measured = {"hit_rate": number / 10, "p95_ms": 100.0 + number}
        rows.append(template.model_copy(update=measured))
    rows.append(rows[0].model_copy(update={"replicas": 3, "hit_rate": 0.99}))  # a smaller fleet
    figure = drawn(draw, report().model_copy(update={"rows": tuple(rows)}), tmp_path / "plot.png")
    hits, latency = figure.axes
    expected_hits: dict[str, list[tuple[float, float]]] = {}
    expected_p95_ms: dict[str, list[tuple[float, float]]] = {}
    for run in rows[:-1]:
        label = f"{run.router}, {run.churn:.0%} replaced a minute"
        expected_hits.setdefault(label, []).append((run.turns, 100 * run.hit_rate))
        expected_p95_ms.setdefault(label, []).append((run.turns, run.p95_ms))
    assert len(expected_hits) == 4
    assert {label: points_of(line) for label, line in lines_of(hits).items()} == expected_hits
    of_latency = {label: points_of(line) for label, line in lines_of(latency).items()}
    assert of_latency == expected_p95_ms
    assert hits.get_ylabel().startswith("%") and latency.get_ylabel().startswith("ms")
