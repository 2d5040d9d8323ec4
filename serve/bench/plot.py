"""The plots of benchmarks: panels of lines with bands. Knows nothing of what was measured."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from serve.bench.report import GridReport, MeasuredRow, Value, label

# Okabe and Ito's palette, which colour-blind readers can tell apart
BLUE, VERMILION, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, ORANGE, GREY = "#56B4E9", "#E69F00", "#444444"
COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY)
MARKERS = "oDsPvX"
LOWER_BOUND = "lower bound"  # drawn as a dashed line
CHARACTERS_PER_INCH = 17  # in the caption
LEGEND_INCHES = 2.2  # the width of an entry


@dataclass(frozen=True)
class Panel:
    """One panel: the quantity `y` against `x`, a line for each value of `line` in the rows. `note`:
    a ratio that stands at each point where it is clearly above 1.
    """

    rows: Sequence[MeasuredRow]
    x: str
    y: str
    line: str
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    is_log: bool = True
    note: str = ""


def panels_by(name: str, rows: Sequence[MeasuredRow], **settings: Any) -> list[Panel]:
    """A panel for each value of a cell's field."""
    by_value: dict[Value, list[MeasuredRow]] = {}
    for row in rows:
        by_value.setdefault(row.cell[name], []).append(row)
    panels: list[Panel] = []
    for value, value_rows in by_value.items():
        panels.append(Panel(value_rows, title=f"{name}: {label(value)}", **settings))
    return panels


def draw(panels: Sequence[Panel], report: GridReport, path: Path) -> None:
    """Write the panels side by side, their legend above and the caption below."""
    figure = Figure(figsize=(1 + 4.8 * len(panels), 5.2), dpi=150, layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel, _names(panels))
    entries: dict[str, Any] = {}
    for axes in all_axes:
        entries |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    width = figure.get_size_inches()[0]
    columns = max(1, min(len(entries), int(width / LEGEND_INCHES)))
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=9,
    )
    caption = textwrap.wrap(
        f"Bands: smallest to largest value. {report.caption}", int(width * CHARACTERS_PER_INCH)
    )
    figure.supxlabel("\n".join(caption), fontsize=7, color=GREY)
    figure.savefig(path)


def _names(panels: Sequence[Panel]) -> list[str]:
    """The names of all lines, so that one has the same colour in every panel."""
    names: dict[str, None] = {}
    for panel in panels:
        names |= dict.fromkeys(_name(panel, row) for row in panel.rows)
    return [name for name in names if name != LOWER_BOUND]


def _name(panel: Panel, row: MeasuredRow) -> str:
    if panel.line:
        return label(row.cell[panel.line])
    return panel.y


def _draw_panel(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    lines: dict[str, list[MeasuredRow]] = {}
    for row in panel.rows:
        lines.setdefault(_name(panel, row), []).append(row)
    for name, rows in lines.items():
        rows.sort(key=lambda row: row.number(panel.x))
        looks: dict[str, Any] = {"color": GREY, "linestyle": "--", "linewidth": 1.2}
        if name != LOWER_BOUND:
            number = names.index(name)
            colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
            looks = {"color": colour, "marker": marker, "markersize": 5}
        x = [row.number(panel.x) for row in rows]
        spreads = [row.measured[panel.y] for row in rows]
        low, high = [spread.min for spread in spreads], [spread.max for spread in spreads]
        axes.fill_between(x, low, high, color=looks["color"], alpha=0.2, linewidth=0)
        axes.plot(x, [spread.median for spread in spreads], label=name, **looks)
        for row in rows:
            _annotate(axes, panel, row, looks["color"])
    _finish(axes, panel)


def _annotate(axes: Axes, panel: Panel, row: MeasuredRow, colour: str) -> None:
    ratio = row.measured.get(panel.note)
    if ratio is None or ratio.median < 1.5:
        return
    point = row.number(panel.x), row.median(panel.y)
    text = f"{ratio.median:.1f}x"
    if ratio.median >= 9.5:
        text = f"{ratio.median:.0f}x"
    axes.annotate(
        text, point, (0, 7), textcoords="offset points", ha="center", fontsize=9, color=colour
    )


def _finish(axes: Axes, panel: Panel) -> None:
    if panel.is_log:
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks = sorted({row.number(panel.x) for row in panel.rows})
        axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.08, y=0.12)
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(panel.title, loc="left", fontsize=11)
    axes.set_xlabel(panel.x_label or panel.x)
    axes.set_ylabel(panel.y_label or panel.y)
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
