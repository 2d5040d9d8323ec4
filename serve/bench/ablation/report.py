"""The ablation's numbers: the JSON file, the table in the terminal, the plot.

Knows nothing of engines.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from guard.files.yaml_file import Strict
from serve.bench.plot import GREY, VERMILION, new_figure, plot_ranges, save_figure
from serve.bench.report import BenchReport, Spread, notes, source

LINEAR_RANGE = 5  # a panel's axis is logarithmic if its times differ by more than this factor
TITLE_COLUMNS = 68  # as wide as a panel


class AblationRow(Strict):
    """One engine under one traffic. Times are medians over its runs in all rounds, from the first
    submission to the last verdict of a run.

    `p95_ms`: the 95th percentile of single verdicts, from the first submission (in the fleet: from
    their own) to the answer. `difference_nats`: the largest difference of a verdict's logit from
    the full engine's; None if its adapters differ.
    """

    ablation: str
    wall_ms: Spread
    engine_ms: float
    p95_ms: float
    computed_tokens: int
    # The time in steps of the bare base in the same engine, see `Traffic`.
    lower_bound_ms: float
    adapter_loads: int  # from disk
    swap_ins: int  # copied into a slot
    difference_nats: float | None
    peak_memory_mib: float  # resident, in the engine's process


class TrafficRows(Strict):
    """One kind of traffic, described in words, and all its engines, the full one first."""

    traffic: str
    description: str
    runs: int  # by each engine
    rows: tuple[AblationRow, ...]


class AblationReport(BenchReport):
    """Everything in `runs/ablation_bench.json`."""

    engine: dict[str, str]
    traffics: tuple[TrafficRows, ...]

    @property
    def rows(self) -> list[AblationRow]:
        """The rows of all kinds of traffic."""
        rows: list[AblationRow] = []
        for traffic in self.traffics:
            rows += traffic.rows
        return rows


def table(report: AblationReport) -> str:
    """The report as text, with times relative to the full engine's."""
    width = max(len(row.ablation) for row in report.rows)
    lines: list[str] = []
    for traffic in report.traffics:
        head = (
            f"{traffic.traffic:<{width}} | {'ms (min to max)':>24} {'in steps':>9} "
            f"{'of lower bound':>14} {'p95 ms':>7} {'tokens':>7} {'loads':>5} {'swap-ins':>8} "
            f"{'MiB':>6} | {'slower':>6}"
        )
        lines += [f"{traffic.traffic}: {traffic.description}", head, "-" * len(head)]
        full_ms = traffic.rows[0].wall_ms.median
        lines += [_line(row, width, full_ms) for row in traffic.rows]
        lines.append("")
    return "\n".join([*lines, *_notes(report), caption(report)])


def _line(row: AblationRow, width: int, full_ms: float) -> str:
    return (
        f"{row.ablation:<{width}} | {row.wall_ms.text():>24} {row.engine_ms:>9.0f} "
        f"{row.engine_ms / row.lower_bound_ms:>14.2f} {row.p95_ms:>7.0f} "
        f"{row.computed_tokens:>7} {row.adapter_loads:>5} {row.swap_ins:>8} "
        f"{row.peak_memory_mib:>6.0f} | {row.wall_ms.median / full_ms:>5.2f}x"
    )


def _notes(report: AblationReport) -> list[str]:
    differences = [row.difference_nats or 0.0 for row in report.rows]
    return notes(
        "of lower bound: time in steps over that of the bare base, which gets one prompt of the",
        "needed tokens, in the fleet every conversation.",
        "p95: of single verdicts, from the first submission.",
        "loads: adapters read from disk. swap-ins: adapters copied into a slot.",
        "MiB: peak memory of the engine's process. slower: its time over the full engine's.",
        "The largest difference of a verdict's logit from the full engine's, with the same",
        f"adapters: {max(differences):.2g} nats.",
    )


def caption(report: AblationReport) -> str:
    """Where the numbers come from, in one line."""
    runs = ", ".join(f"{traffic.runs} runs of {traffic.traffic}" for traffic in report.traffics)
    return f"{source(report)}; random aLoRAs; medians of {runs}."


def draw(report: AblationReport, path: Path) -> None:
    """Write the plot: a panel for each traffic, for each engine its median with its smallest and
    largest time.
    """
    counts = [len(traffic.rows) for traffic in report.traffics]
    figure = new_figure(8, 0.32 * sum(counts) + 1.1 * len(counts) + 0.7)
    ratios = [count + 0.8 for count in counts]
    panels = figure.subplots(len(counts), 1, squeeze=False, height_ratios=ratios)[:, 0]
    for axes, traffic in zip(panels, report.traffics, strict=True):
        _draw_panel(axes, traffic)
    save_figure(figure, caption(report), path)


def _draw_panel(axes: Axes, traffic: TrafficRows) -> None:
    names = [row.ablation for row in traffic.rows]
    walls = [row.wall_ms for row in traffic.rows]
    y = list(range(len(names)))
    plot_ranges(axes, y, walls, color=VERMILION, marker="o", markersize=5)
    axes.set_yticks(y, names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.axvline(walls[0].median, color=GREY, linewidth=0.6, linestyle=":")
    fastest_ms, slowest_ms = min(wall.min for wall in walls), max(wall.max for wall in walls)
    if slowest_ms > LINEAR_RANGE * fastest_ms:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axes.set_xlim(0, 1.05 * slowest_ms)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    title = textwrap.fill(f"{traffic.traffic}: {traffic.description}", TITLE_COLUMNS)
    axes.set_title(title, fontsize=8, loc="left")
    axes.set_xlabel("ms to all verdicts: median, smallest to largest")
    axes.grid(axis="x", linewidth=0.4, alpha=0.6)
