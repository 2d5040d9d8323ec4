"""The benchmark of the server, small, on the real server; its table, plot and report."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from guard.recipe import load_recipe
from serve.bench.http.load import HttpRun, SentCheck
from serve.bench.http.run import HttpReport, _row, draw, run, table


def test_a_row_counts_what_was_late_shed_and_lost() -> None:
    statuses = [(200, 0.1), (200, 0.3), (200, 7.0), (503, 0.0), (0, 1.0), (500, 1.0)]
    sent = tuple(SentCheck(status, latency_s, latency_s - 0.05) for status, latency_s in statuses)
    row = _row(HttpRun(sent, wall_s=4.0), 1.5, [0.5, 1.0, 1.5, 2.0, 2.5, 3.0], 5.0)
    assert (row.answered, row.late, row.shed, row.failed) == (3, 1, 1, 2)
    assert row.goodput_per_second == 0.5 and row.offered_per_second == 2.0
    assert row.p50_ms == pytest.approx(300)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_the_server_is_measured_beside_its_engine_and_under_load(tmp_path: Path) -> None:
    report = run(load_recipe("tiny"), checks=10, repeats=2, shares=(0.5,))
    assert report.overhead is not None and report.saturation_per_second is not None
    assert report.overhead.http_ms.min > 0 and report.overhead.engine_ms.min > 0
    (row,) = report.rates
    assert (row.answered, row.shed, row.late, row.failed) == (10, 0, 0, 0)
    path = tmp_path / "http_bench.json"
    report.save(path)
    assert HttpReport.load(path) == report
    assert "saturation" in table(report) and "20 rules x 1,000 tokens" in table(report)
    draw(report, path.with_suffix(".png"))
    with Image.open(path.with_suffix(".png")) as image:
        assert image.size[0] > 500
