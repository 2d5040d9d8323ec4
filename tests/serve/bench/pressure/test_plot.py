"""The pressure benchmark's plot, of made-up figures."""

from __future__ import annotations

from pathlib import Path

from serve.bench.pressure.plot import draw
from tests.serve.bench.drawn import drawn, lines_of, points_of
from tests.serve.bench.pressure.toy_report import toy_report


def test_every_engine_has_a_curve_of_its_throughput_in_every_round(tmp_path: Path) -> None:
    report = toy_report()
    (axes,) = drawn(draw, report, tmp_path / "plot.png").axes
    expected: dict[str, list[tuple[float, float]]] = {}
    for row in report.rows:
        label = f"{row.round}, {row.slots} slots, {row.order}"
        point = (row.demand, row.verdicts_per_second.median)
        expected.setdefault(label, []).append(point)
    assert len(expected) == 6
    lines = lines_of(axes)
    assert {label: points_of(line) for label, line in lines.items()} == expected
    assert len({(line.get_color(), line.get_marker()) for line in lines.values()}) == 6
    assert axes.get_ylim()[0] == 0


def test_every_curve_has_a_band_from_its_smallest_to_its_largest_throughput(
    tmp_path: Path,
) -> None:
    report = toy_report()
    (axes,) = drawn(draw, report, tmp_path / "plot.png").axes
    of_first_curve = report.rows[:4]
    corners = axes.collections[0].get_paths()[0].vertices
    for row in of_first_curve:
        heights = {float(y) for x, y in corners if x == row.demand}
        assert heights == {row.verdicts_per_second.min, row.verdicts_per_second.max}
