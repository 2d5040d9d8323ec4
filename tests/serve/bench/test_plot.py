"""The plots of grids, on made-up rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from serve.bench import plot
from serve.bench.plot import LOWER_BOUND, Panel
from serve.bench.report import GridReport, MeasuredRow, Spread
from tests.serve.bench.drawn import drawn, lines_of, points_of


def rows_of(line: str, *walls_ms: float) -> list[MeasuredRow]:
    rows: list[MeasuredRow] = []
    for number, wall_ms in enumerate(walls_ms):
        measured = {"wall_ms": Spread.of([wall_ms, wall_ms + 2]), "p": Spread.of([7.0])}
        if line == "lora":
            measured["over_alora"] = Spread.of([10.0**number])
        rows.append(
            MeasuredRow(cell={"rules": 10**number, "mode": line}, repeats=2, measured=measured)
        )
    return rows


def report_of(rows: Sequence[MeasuredRow]) -> GridReport:
    return GridReport(
        commit="abc1234",
        hardware="two cores",
        versions={"vllm": "0.32.0", "torch": "2.13.0"},
        model="tiny",
        peak_memory_mib=1.0,
        benchmark="toy",
        inputs="inputs",
        threads=2,
        engine={},
        facts={},
        is_resumed=False,
        ended_by=None,
        left_out=(),
        rows=tuple(rows),
    )


ROWS = [*rows_of("lora", 1, 10, 100), *rows_of("alora", 1, 2, 3), *rows_of(LOWER_BOUND, 1, 1, 1)]


def test_every_line_has_its_points_a_band_and_one_colour_in_all_panels(tmp_path: Path) -> None:
    panels = [
        Panel(ROWS, "rules", ("wall_ms",), "mode", title="rules", note="over_alora"),
        Panel(ROWS[3:], "rules", ("wall_ms",), "mode", is_log=False),
        Panel(ROWS[:3], "rules", ("wall_ms", "p"), "", x_label="rules"),  # a line for each
    ]
    figure = drawn(
        lambda report, path: plot.draw(panels, report, path), report_of(ROWS), tmp_path / "a.png"
    )
    left, right, several = figure.axes
    lines = lines_of(left)
    assert list(lines) == ["LoRA", "aLoRA", LOWER_BOUND]
    assert points_of(lines["LoRA"]) == [(1.0, 2.0), (10.0, 11.0), (100.0, 101.0)]
    assert len(left.collections) == 3 and lines[LOWER_BOUND].get_linestyle() == "--"
    assert lines["aLoRA"].get_color() == lines_of(right)["aLoRA"].get_color()
    assert [text.get_text() for text in left.texts] == ["10x", "100x"]
    assert (left.get_xscale(), right.get_xscale()) == ("log", "linear")
    assert left.get_title(loc="left") == "rules"
    assert list(lines_of(several)) == ["wall_ms", "p"]
    assert [y for _, y in points_of(lines_of(several)["p"])] == [7.0] * 3
    caption = " ".join(figure.get_supxlabel().split())
    assert "tiny on two cores; commit abc1234; vllm 0.32.0, torch 2.13.0; repeats 2" in caption


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_plot_shows_its_whole_legend(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(figure: Figure, path: Path) -> None:
        figure.draw_without_rendering()
        (legend,) = figure.legends
        shown = legend.get_window_extent()
        assert figure.bbox.x0 <= shown.x0 and shown.x1 <= figure.bbox.x1
        assert shown.y1 <= figure.bbox.y1
        assert all(shown.y0 >= axes.get_tightbbox().y1 - 1 for axes in figure.axes)

    monkeypatch.setattr(Figure, "savefig", check)
    plot.draw([Panel(ROWS, "rules", ("wall_ms",), "mode")] * count, report_of(ROWS), tmp_path)
