"""The table of the cluster benchmark, of the reports that were kept."""

from __future__ import annotations

import pytest

from guard.layout import ROOT
from serve.bench.cluster.report import ClusterReport, table

BENCHMARKS = ROOT / "docs" / "benchmarks" / "serving"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("cluster_tiny_2cores", "further checks of conversations: "),
        ("cluster_cost_tiny_2cores", "one replica, ingress  "),
        ("cluster_kills_2cores", " replicas killed: "),
        ("cluster_shards_tiny_2cores", "2 shards, 20 rules x 1,000 tokens: "),
        ("cluster_autoscaling_tiny_1core", "1-2 replicas: the second answers "),
    ],
)
def test_a_kept_report_has_a_line_for_what_it_measured(name: str, line: str) -> None:
    report = ClusterReport.load(BENCHMARKS / f"{name}.json")
    text = table(report)
    assert line in text and report.commit in text


def test_a_part_that_was_left_out_has_no_line() -> None:
    report = ClusterReport.load(BENCHMARKS / "cluster_kills_2cores.json")
    assert report.cost is None and report.shards is None
    text = table(report)
    assert "one server" not in text and "shards" not in text
