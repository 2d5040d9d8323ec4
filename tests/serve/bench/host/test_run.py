"""A check on the narrow base is split by cause, and nothing of it is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.bench.host.run import CAUSES, MODEL, HostCell, HostReport, run, table
from serve.bench.report import Spread
from tests.serve.cards import recipe

pytestmark = pytest.mark.slow


def test_every_cause_is_met_and_the_split_is_the_check() -> None:
    report = run(recipe(), lengths=[80], rules=[1, 4], repeats=2)
    assert [(cell.tokens, cell.rules) for cell in report.cells] == [(80, 1), (80, 4)]
    for cell in report.cells:
        assert set(cell.split_ms) == set(CAUSES)
        assert all(spent_ms > 0 for spent_ms in cell.split_ms.values())
        assert 0 < cell.host_ms < cell.wall_ms.median
        # The same work at another time, with clocks in it; on a busy machine both vary.
        assert 0.05 < sum(cell.split_ms.values()) / cell.wall_ms.median < 20
    lines = table(report).splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [["80", "1"], ["80", "4"]]


def cell(rules: int, wall_ms: float, model_share: float) -> HostCell:
    split_ms = dict.fromkeys(CAUSES, 0.0) | {MODEL: model_share, "scheduling": 1 - model_share}
    return HostCell(tokens=200, rules=rules, wall_ms=Spread.of([wall_ms]), split_ms=split_ms)


def test_a_further_rule_costs_what_two_cells_differ_by(tmp_path: Path) -> None:
    cells = [cell(20, 10.0, 0.5), cell(500, 106.0, 0.5)]
    report = HostReport(
        commit="c",
        hardware="h",
        versions={},
        model="tiny",
        peak_memory_mib=1.0,
        repeats=1,
        cells=cells,
    )
    assert report.cells[0].host_ms == pytest.approx(5.0)
    assert report.marginal_ms(200, 20, 500) == pytest.approx(0.1)
    assert report.marginal_ms(200, 20, 100) is None
    assert "200 tokens, a further rule from 20 to 500: 0.100 ms" in table(report)
    report.save(tmp_path / "host_bench.json")
    assert HostReport.load(tmp_path / "host_bench.json") == report
