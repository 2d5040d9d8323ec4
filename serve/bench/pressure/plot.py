"""The pressure benchmark's plot. Knows nothing of engines."""

from __future__ import annotations

from pathlib import Path

from serve.bench.plot import (
    BLUE,
    ORANGE,
    SKY,
    VERMILION,
    new_figure,
    plot_spreads,
    save_figure,
)
from serve.bench.pressure.report import PressureReport, PressureRow, caption
from serve.bench.pressure.work import DEMANDS

COLOURS = (VERMILION, BLUE, ORANGE, SKY, "#7A3300", "#003A5D")  # one for each curve


def draw(report: PressureReport, path: Path) -> None:
    """Write the plot: verdicts per second against the demand."""
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    curves: dict[str, list[PressureRow]] = {}
    for row in report.rows:
        curves.setdefault(f"{row.round}, {row.slots} slots, {row.order}", []).append(row)
    for (label, rows), colour, marker in zip(curves.items(), COLOURS, "D^osvX", strict=True):
        spreads = [row.verdicts_per_second for row in rows]
        demands = [row.demand for row in rows]
        plot_spreads(axes, demands, spreads, color=colour, marker=marker, label=label)
    axes.legend(frameon=False)
    axes.set_xscale("log", base=2)
    axes.set_xticks(DEMANDS, [f"{demand:g}x" for demand in DEMANDS])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of all conversations over those the KV cache holds")
    axes.set_ylabel("verdicts per second")
    axes.grid(linewidth=0.4, alpha=0.6)
    save_figure(figure, caption(report), path)
