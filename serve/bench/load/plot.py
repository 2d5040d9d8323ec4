"""The load benchmark's plot. Knows nothing of engines."""

from __future__ import annotations

from pathlib import Path

from guard.method import METHODS
from serve.bench.load.report import LoadReport, caption
from serve.bench.plot import METHOD_COLOURS, new_figure, save_figure


def draw(report: LoadReport, path: Path) -> None:
    """Write the plot: median and 95th percentile of the latency against the offered rate."""
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    for method in dict.fromkeys(row.method for row in report.rows):
        rows = [row for row in report.rows if row.method == method]
        rates = [row.offered_per_second for row in rows]
        colour, label = METHOD_COLOURS[method], METHODS[method].label
        p50_ms, p95_ms = [row.p50_ms for row in rows], [row.p95_ms for row in rows]
        axes.plot(rates, p50_ms, color=colour, marker="o", label=f"{label}, median")
        axes.plot(rates, p95_ms, color=colour, marker="^", linestyle="--", label=f"{label}, 95 %")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("offered load: conversations per second")
    axes.set_ylabel("ms from arrival to the last verdict")
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.legend()
    save_figure(figure, caption(report), path)
