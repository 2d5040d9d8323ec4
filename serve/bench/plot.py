"""What the benchmarks' plots have in common: colours, bands of spreads, the caption.

Knows nothing of what was measured.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from guard.method import METHODS
from serve.bench.report import Spread

# Okabe and Ito's palette, which colour-blind readers can tell apart
BLUE, VERMILION, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, ORANGE, GREY = "#56B4E9", "#E69F00", "#444444"
METHOD_COLOURS = dict(zip(METHODS, itertools.cycle((BLUE, VERMILION, PINK, ORANGE, GREEN, SKY))))
METHOD_MARKERS = dict(zip(METHODS, itertools.cycle("oDPsvX")))


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, with 150 dots an inch."""
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def plot_spreads(axes: Axes, x: Sequence[float], spreads: Sequence[Spread], **looks: Any) -> None:
    """Draw a line through the medians, and a band from the smallest to the largest values.

    `looks`: matplotlib's options for the line.
    """
    low, high = [spread.min for spread in spreads], [spread.max for spread in spreads]
    axes.fill_between(x, low, high, color=looks["color"], alpha=0.2, linewidth=0)
    axes.plot(x, [spread.median for spread in spreads], **looks)


def plot_ranges(axes: Axes, y: Sequence[float], spreads: Sequence[Spread], **looks: Any) -> None:
    """Draw a dot at each median, in line `y`, and a bar from the smallest to the largest value.

    `looks`: matplotlib's options for the dots.
    """
    medians = [spread.median for spread in spreads]
    below = [spread.median - spread.min for spread in spreads]
    above = [spread.max - spread.median for spread in spreads]
    errors = [below, above]
    axes.errorbar(medians, y, xerr=errors, linestyle="none", ecolor=GREY, capsize=2, **looks)


def save_figure(figure: Figure, caption: str, path: Path, columns: int = 120) -> None:
    """Write the figure with its caption below it, in lines of `columns` characters."""
    lines = "\n".join(textwrap.wrap(caption, columns))
    figure.supxlabel(lines, fontsize=7, color=GREY)
    figure.savefig(path)
