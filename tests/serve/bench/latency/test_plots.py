"""The latency plots."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from serve.bench.latency.plots import draw_length, draw_rules
from tests.serve.bench.latency.toy_report import toy_report


def test_both_plots_are_drawn(tmp_path: Path) -> None:
    draw_length(toy_report(), 5, tmp_path / "length.png")
    draw_rules(toy_report(), (1000, 5000), tmp_path / "rules.png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


@pytest.mark.parametrize("lengths", [(1000,), (1000, 5000)])
def test_a_plot_shows_its_whole_legend(
    lengths: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(figure: Figure, path: Path) -> None:
        figure.draw_without_rendering()
        (legend,) = figure.legends
        shown = legend.get_window_extent()
        assert figure.bbox.x0 <= shown.x0 and shown.x1 <= figure.bbox.x1
        assert shown.y1 <= figure.bbox.y1
        assert all(shown.y0 >= axes.get_tightbbox().y1 for axes in figure.axes)

    monkeypatch.setattr(Figure, "savefig", drawn)
    draw_rules(toy_report(), lengths, tmp_path / "rules.png")
