from __future__ import annotations

from pathlib import Path

from PIL import Image

from serve.plan.routing.report import RoutingReport, RoutingRow, draw, table
from serve.plan.routing.ring import ROUTERS


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


def test_the_report_is_kept_and_drawn(tmp_path: Path) -> None:
    report().save(tmp_path / "routing.json")
    text = (tmp_path / "routing.json").read_text(encoding="utf-8")
    assert RoutingReport.model_validate_json(text) == report()
    draw(report(), tmp_path / "routing.png")
    with Image.open(tmp_path / "routing.png") as image:
        assert image.size[0] > 900
