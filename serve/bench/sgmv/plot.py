"""The SGMV microbenchmark's plot. Knows nothing of operators but their names."""

from __future__ import annotations

import textwrap
from pathlib import Path

from serve.bench.plot import (
    BLUE,
    GREEN,
    GREY,
    VERMILION,
    new_figure,
    plot_ranges,
    save_figure,
)
from serve.bench.sgmv.report import LOOP, OURS, VLLMS, SgmvReport, caption

# Operator -> its colour and marker
OPERATORS = {OURS: (VERMILION, "D"), LOOP: (BLUE, "o"), VLLMS: (GREEN, "s")}
BOUND = "lower bound"


def draw(report: SgmvReport, path: Path) -> None:
    """Write the plot: for each batch a line for every operator, and one for the lower bound."""
    bounds = {row.batch: row.lower_bound_ms for row in report.rows}
    figure = new_figure(8, 0.9 * len(bounds) + 1.8)
    axes = figure.add_subplot()
    for number, (operator, (colour, marker)) in enumerate(OPERATORS.items()):
        spreads = [row.ms for row in report.rows if row.operator == operator]
        y = _lines(len(spreads), number)
        plot_ranges(axes, y, spreads, color=colour, marker=marker, label=operator)
    y = _lines(len(bounds), len(OPERATORS))
    axes.plot(list(bounds.values()), y, "k|", markersize=12, label=BOUND)
    for edge in range(1, len(bounds)):
        axes.axhline(edge - 0.5, color=GREY, linewidth=0.4)
    axes.set_yticks(range(len(bounds)), [textwrap.fill(name, 30) for name in bounds])
    axes.set_ylim(len(bounds) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("ms a step: median, smallest to largest")
    axes.grid(axis="x", linewidth=0.4, alpha=0.6)
    figure.legend(loc="outside upper right", ncols=len(OPERATORS) + 1, frameon=False)
    save_figure(figure, caption(report), path)


def _lines(batches: int, number: int) -> list[float]:
    """The positions of each batch's line `number`, from -0.3 to 0.3 around the batch's own."""
    return [batch - 0.3 + 0.6 * number / len(OPERATORS) for batch in range(batches)]
