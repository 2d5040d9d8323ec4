"""The ablation's table and plot, on the kept measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.container import ErrorbarContainer

from guard.layout import ROOT
from serve.bench.ablation.ablations import ABLATIONS, FULL_ENGINE
from serve.bench.ablation.report import AblationReport, draw, table
from tests.serve.bench.drawn import drawn


def kept() -> AblationReport:
    (path,) = (ROOT / "docs" / "benchmarks").rglob("ablation_tiny_2cores.json")
    return AblationReport.load(path)


def test_the_table_states_every_engine_as_times_of_the_full_one() -> None:
    lines = table(kept()).splitlines()
    full = [line for line in lines if line.startswith(f"{FULL_ENGINE} ") and "|" in line]
    assert len(full) == 3 and all(line.endswith("1.00x") for line in full)


def test_the_kept_ablations_are_those_of_the_table() -> None:
    for traffic, ablations in zip(kept().traffics, ABLATIONS.values(), strict=True):
        assert [row.ablation for row in traffic.rows] == [ablation.name for ablation in ablations]


def test_the_plot_has_a_panel_for_each_traffic_with_every_engine_s_median_and_range(
    tmp_path: Path,
) -> None:
    figure = drawn(draw, kept(), tmp_path / "plot.png")
    assert len(figure.axes) == len(kept().traffics)
    for axes, traffic in zip(figure.axes, kept().traffics, strict=True):
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert names == [row.ablation for row in traffic.rows]
        (dots,) = axes.containers
        assert isinstance(dots, ErrorbarContainer)
        medians, _, (ranges,) = dots.lines
        walls = [row.wall_ms for row in traffic.rows]
        assert list(medians.get_xdata()) == [wall.median for wall in walls]
        for wall, segment in zip(walls, ranges.get_segments(), strict=True):
            assert [x for x, _ in segment] == pytest.approx([wall.min, wall.max])


def test_an_axis_is_logarithmic_or_begins_at_zero_and_shows_every_time(tmp_path: Path) -> None:
    figure = drawn(draw, kept(), tmp_path / "plot.png")
    for axes, traffic in zip(figure.axes, kept().traffics, strict=True):
        left, right = axes.get_xlim()
        assert axes.get_xscale() == "log" or left == 0
        assert left < min(row.wall_ms.min for row in traffic.rows)
        assert right > max(row.wall_ms.max for row in traffic.rows)
    assert [axes.get_xscale() for axes in figure.axes] == ["log", "linear", "linear"]


def test_a_panel_s_title_is_not_cut_off(tmp_path: Path) -> None:
    figure = drawn(draw, kept(), tmp_path / "plot.png")
    figure.draw_without_rendering()
    for axes, traffic in zip(figure.axes, kept().traffics, strict=True):
        title = axes.get_title(loc="left")
        assert title.replace("\n", " ") == f"{traffic.traffic}: {traffic.description}"
        shown = axes._left_title.get_window_extent()  # type: ignore[attr-defined]
        assert figure.bbox.x0 <= shown.x0 and shown.x1 <= figure.bbox.x1
        assert shown.y1 <= figure.bbox.y1
