"""The load benchmark's plot, of the report that was kept."""

from __future__ import annotations

from pathlib import Path

from guard.home import ROOT
from guard.method import METHODS
from serve.bench.load.plot import draw
from serve.bench.load.report import LoadReport
from tests.serve.bench.drawn import drawn, lines_of, points_of

KEPT = ROOT / "docs/benchmarks/serving/load_tiny_2cores.json"
NAMES = {50: "median", 95: "95 %"}  # of a percentile, in the legend


def test_percentiles_are_lines_and_saturated_ones_are_open_symbols_apart(tmp_path: Path) -> None:
    report = LoadReport.load(KEPT)
    assert {row.is_saturated for row in report.rows} == {True, False}
    (axes,) = drawn(draw, report, tmp_path / "plot.png").axes
    lines = lines_of(axes)
    expected: dict[str, list[tuple[float, float]]] = {}
    for row in report.rows:
        for percent, name in NAMES.items():
            label = f"{METHODS[row.method].label}, {name}"
            if row.is_saturated:
                label += ": saturated, grows with the run"
            ms = row.p50_ms if percent == 50 else row.p95_ms
            expected.setdefault(label, []).append((row.offered_per_second, ms))
    assert {label: points_of(line) for label, line in lines.items()} == expected
    for label, line in lines.items():
        is_apart = "saturated" in label
        assert (line.get_linestyle() == "None") == is_apart
        assert (line.get_fillstyle() == "none") == is_apart


def test_without_saturation_nothing_is_called_saturated(tmp_path: Path) -> None:
    report = LoadReport.load(KEPT)
    steady = tuple(row for row in report.rows if not row.is_saturated)
    figure = drawn(draw, report.model_copy(update={"rows": steady}), tmp_path / "plot.png")
    (axes,) = figure.axes
    assert not [label for label in lines_of(axes) if "saturated" in label]
