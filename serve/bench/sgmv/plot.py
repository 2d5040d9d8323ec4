"""The SGMV microbenchmark's plot. Knows nothing of operators but their names."""

from __future__ import annotations

import textwrap
from pathlib import Path

from serve.bench.plot import BLUE, GREEN, VERMILION, new_figure, save_figure
from serve.bench.sgmv.report import LOOP, OURS, VLLMS, SgmvReport, caption

COLOURS = {OURS: VERMILION, LOOP: BLUE, VLLMS: GREEN}  # by operator


def draw(report: SgmvReport, path: Path) -> None:
    """Write the plot: a group of bars for each batch."""
    bounds = {row.batch: row.lower_bound_ms for row in report.rows}
    figure = new_figure(8, 0.9 * len(bounds) + 1.8)
    axes = figure.add_subplot()
    for number, (operator, colour) in enumerate(COLOURS.items()):
        medians = [row.ms.median for row in report.rows if row.operator == operator]
        y = [index + 0.25 * (number - 1) for index in range(len(medians))]
        axes.barh(y, medians, 0.25, color=colour, label=operator)
    y = list(range(len(bounds)))
    axes.plot(list(bounds.values()), y, "k|", markersize=24, label="lower bound")
    axes.set_yticks(y, [textwrap.fill(name, 30) for name in bounds])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms a step")
    axes.grid(axis="x", linewidth=0.4, alpha=0.6)
    axes.legend()
    save_figure(figure, caption(report), path)
