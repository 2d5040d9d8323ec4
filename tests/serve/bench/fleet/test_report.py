"""The fleet's table and shares, on made-up rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from serve.bench.fleet.report import ALL_RESIDENT, PEFT, FleetReport, FleetRow, caption, draw, table
from serve.bench.report import Spread


def row(server: str, alpha: float | None, per_second: float, requests: int = 40) -> FleetRow:
    spread = Spread.of([per_second])
    return FleetRow(
        server=server,
        method="alora",
        adapters=8,
        alpha=alpha,
        requests=requests,
        working_set=3,
        requests_per_second=spread,
        p50_ms=1.0,
        p95_ms=2.0,
        p99_ms=3.0,
        forward_passes=9,
        adapter_loads=4,
        swap_ins=6,
        adapter_mib=0.5,
        computed_tokens=100,
    )


def report_of(*rows: FleetRow) -> FleetReport:
    return FleetReport(
        commit="abc1234",
        hardware="two cores",
        versions={},
        model="tiny",
        peak_memory_mib=1.0,
        workers=16,
        conversation_tokens=200,
        repeats=1,
        engine={},
        rows=rows,
    )


@pytest.mark.parametrize("alpha", [None, 1.0])
def test_throughput_is_stated_as_a_share_of_all_resident(
    alpha: float | None, tmp_path: Path
) -> None:
    report = report_of(row(PEFT, alpha, 30.0), row(ALL_RESIDENT, alpha, 40.0))
    line = next(line for line in table(report).splitlines() if PEFT in line)
    assert "75%" in line and "30.0 (30.0 to 30.0)" in line
    assert (report.rows[0].loaded_mib, report.rows[0].swapped_in_mib) == (2.0, 3.0)
    draw(report, tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.size == (1200, 780)


def test_that_peft_got_only_the_first_requests_stands_in_table_and_caption() -> None:
    cells = ((10, 40), (20, 40))
    rows = []
    for peft_requests, requests in cells:
        rows += [row(PEFT, None, 30.0, peft_requests), row(ALL_RESIDENT, None, 40.0, requests)]
    several = report_of(*rows)
    text = " ".join(table(several).split())
    assert "a 25-adapter LRU, only the first 10 to 20 of 40 requests of a run." in text
    assert "25-adapter LRU, only the first 10 to 20 of 40 requests; median" in caption(several)
    assert "only the first 10 of 40 requests" in caption(report_of(*rows[:2]))


def test_where_peft_got_all_requests_nothing_is_said_of_them() -> None:
    rows = row(PEFT, None, 30.0), row(ALL_RESIDENT, None, 40.0)
    for report in (report_of(*rows), report_of(rows[0]), report_of(rows[1])):
        assert "only the first" not in table(report)
