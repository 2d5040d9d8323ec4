"""What plots have in common."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.container import ErrorbarContainer
from PIL import Image

from serve.bench.plot import (
    METHOD_COLOURS,
    VERMILION,
    new_figure,
    plot_ranges,
    plot_spreads,
    save_figure,
)
from serve.bench.report import Spread


def test_spreads_are_a_line_with_a_band_and_the_caption_is_below(tmp_path: Path) -> None:
    figure = new_figure(4, 3)
    axes = figure.add_subplot()
    spreads = [Spread.of([1.0, 2.0, 3.0]), Spread.of([4.0, 5.0, 6.0])]
    plot_spreads(axes, [1, 2], spreads, color=METHOD_COLOURS["alora"], label="aLoRA")
    assert list(axes.lines[0].get_ydata()) == [2.0, 5.0]
    assert len(axes.collections) == 1
    save_figure(figure, "where it comes from " * 20, tmp_path / "plot.png", columns=60)
    with Image.open(tmp_path / "plot.png") as image:
        assert image.size == (600, 450)
    assert figure.get_supxlabel().count("\n") > 3


def test_ranges_are_dots_at_medians_with_bars_from_smallest_to_largest() -> None:
    axes = new_figure(4, 3).add_subplot()
    spreads = [Spread.of([1.0, 2.0, 4.0]), Spread.of([5.0])]
    plot_ranges(axes, [0, 1], spreads, color=VERMILION, marker="o", label="ours")
    (dots,) = axes.containers
    assert isinstance(dots, ErrorbarContainer) and dots.get_label() == "ours"
    medians, _, (bars,) = dots.lines
    assert list(medians.get_xdata()) == [2.0, 5.0] and medians.get_linestyle() == "None"
    expected = [[1.0, 0.0, 4.0, 0.0], [5.0, 1.0, 5.0, 1.0]]
    for segment, ends in zip(bars.get_segments(), expected, strict=True):
        assert segment.ravel().tolist() == pytest.approx(ends)
