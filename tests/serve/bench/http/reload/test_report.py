"""The reload benchmark's table, of the report that was kept."""

from __future__ import annotations

from guard.home import ROOT
from serve.bench.http.reload.report import ReloadReport, table


def test_the_kept_report_loads_and_has_a_table() -> None:
    report = ReloadReport.load(ROOT / "docs/benchmarks/serving/reload_tiny_2cores.json")
    text = table(report)
    assert f"{report.replacements} replacements of {report.rules} rules" in text
    assert report.commit in text
