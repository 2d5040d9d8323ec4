"""The load benchmark's plot. Knows nothing of engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from guard.method import METHODS
from serve.bench.load.report import LoadReport, LoadRow, caption
from serve.bench.plot import METHOD_COLOURS, new_figure, save_figure


def draw(report: LoadReport, path: Path) -> None:
    """Write the plot: median and 95th percentile of the latency against the offered rate.

    At a rate that saturates a method, its latencies grow with the length of the run: they are open
    symbols that no line joins.
    """
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    for method in dict.fromkeys(row.method for row in report.rows):
        _draw_method(axes, method, [row for row in report.rows if row.method == method])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("offered load: conversations per second")
    axes.set_ylabel("ms from arrival to the last verdict")
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.legend(fontsize=8)
    save_figure(figure, caption(report), path)


def _draw_method(axes: Axes, method: str, rows: Sequence[LoadRow]) -> None:
    colour, label = METHOD_COLOURS[method], METHODS[method].label
    steady = [row for row in rows if not row.is_saturated]
    saturated = [row for row in rows if row.is_saturated]
    for percent, name, marker, style in ((50, "median", "o", "-"), (95, "95 %", "^", "--")):
        axes.plot(
            [row.offered_per_second for row in steady],
            [getattr(row, f"p{percent}_ms") for row in steady],
            color=colour,
            marker=marker,
            linestyle=style,
            label=f"{label}, {name}",
        )
        if saturated:
            axes.plot(
                [row.offered_per_second for row in saturated],
                [getattr(row, f"p{percent}_ms") for row in saturated],
                color=colour,
                marker=marker,
                linestyle="none",
                fillstyle="none",
                label=f"{label}, {name}: saturated, grows with the run",
            )
