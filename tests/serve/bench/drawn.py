"""What a plot shows: the figure that was written, and its lines. Tests only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pytest import MonkeyPatch

SomeReport = TypeVar("SomeReport")


def drawn(draw: Callable[[SomeReport, Path], None], report: SomeReport, path: Path) -> Figure:
    """Draw the report to the path, and return the figure that was written there."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, target: Path) -> None:
        figures.append(figure)
        save(figure, target)

    with MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        draw(report, path)
    (figure,) = figures
    assert path.read_bytes().startswith(b"\x89PNG")
    return figure


def lines_of(axes: Axes) -> dict[str, Line2D]:
    """The lines that have an entry in the legend, by its text."""
    handles, labels = axes.get_legend_handles_labels()
    lines: dict[str, Line2D] = {}
    for handle, label in zip(handles, labels, strict=True):
        if isinstance(handle, Line2D):
            lines[label] = handle
    return lines


def points_of(line: Line2D) -> list[tuple[float, float]]:
    """The points of a line, in the units of the axes."""
    return [(float(x), float(y)) for x, y in line.get_xydata()]  # type: ignore[union-attr]
