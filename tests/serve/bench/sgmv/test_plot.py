"""The microbenchmark's plot, of made-up times."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.container import ErrorbarContainer

from serve.bench.sgmv.plot import BOUND, draw
from serve.bench.sgmv.report import LOOP, OURS, VLLMS
from tests.serve.bench.drawn import drawn, lines_of, points_of
from tests.serve.bench.sgmv.toy_report import toy_report


def test_every_operator_and_the_lower_bound_have_a_line_of_their_own(tmp_path: Path) -> None:
    (axes,) = drawn(draw, toy_report(), tmp_path / "plot.png").axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["few", "one"]
    assert axes.get_xscale() == "log" and not axes.patches  # no bars from an arbitrary zero
    points = {BOUND: points_of(lines_of(axes)[BOUND])}
    for dots in axes.containers:
        assert isinstance(dots, ErrorbarContainer)
        points[str(dots.get_label())] = points_of(dots.lines[0])
    expected = {OURS: 3.0, LOOP: 6.0, VLLMS: 9.0, BOUND: 2.0}
    assert {name: [x for x, _ in drawn_at] for name, drawn_at in points.items()} == {
        name: [ms, ms] for name, ms in expected.items()
    }
    for number in range(2):
        y = [drawn_at[number][1] for drawn_at in points.values()]
        assert len(set(y)) == 4 and all(number - 0.5 < line < number + 0.5 for line in y)


def test_a_bar_goes_from_the_smallest_to_the_largest_time(tmp_path: Path) -> None:
    report = toy_report()
    spread = report.rows[0].ms.model_copy(update={"min": 2.5, "max": 5.0})
    first = report.rows[0].model_copy(update={"ms": spread})
    wide = report.model_copy(update={"rows": (first, *report.rows[1:])})
    (axes,) = drawn(draw, wide, tmp_path / "plot.png").axes
    ours = axes.containers[0]
    assert isinstance(ours, ErrorbarContainer) and ours.get_label() == OURS
    (ranges,) = ours.lines[2]
    assert [x for x, _ in ranges.get_segments()[0]] == pytest.approx([2.5, 5.0])
