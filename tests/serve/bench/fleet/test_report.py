"""The fleet's table and shares, on made-up rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from serve.bench.fleet.report import ALL_RESIDENT, PEFT, FleetReport, FleetRow, draw, table
from serve.bench.report import Spread


def row(server: str, alpha: float | None, per_second: float) -> FleetRow:
    spread = Spread.of([per_second])
    return FleetRow(
        server=server,
        method="alora",
        adapters=8,
        alpha=alpha,
        requests=40,
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
