"""The load benchmark's table, of the report that was kept."""

from __future__ import annotations

from guard.home import ROOT
from serve.bench.load.report import LoadReport, table


def test_a_saturated_method_is_said_to_be() -> None:
    report = LoadReport.load(ROOT / "docs/benchmarks/serving/load_tiny_2cores.json")
    lines = table(report).splitlines()
    saturated = [row for row in report.rows if row.is_saturated]
    assert 0 < len(saturated) < len(report.rows)
    assert sum("saturated at" in line for line in lines) == len(saturated)
