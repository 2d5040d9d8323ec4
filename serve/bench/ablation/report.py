"""The ablation's numbers: the JSON file, the table in the terminal, the plot. Knows nothing of engines."""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from guard.files.yaml_file import Strict
from serve.bench.report import BenchReport


class AblationRow(Strict):
    """One engine under one traffic: medians over its runs in all rounds, in ms, from the first question to the last verdict of a run."""

    variant: str
    wall_ms: float
    wall_ms_min: float
    wall_ms_max: float
    engine_ms: float
    p95_ms: float  # of single verdicts, from the first question (in the fleet: from their own) to the answer
    computed_tokens: int
    limit_ms: float  # time in steps of what the base needs for the same, see `Traffic`; in the same engine
    adapter_loads: int  # from disk
    swap_ins: int  # copied into a slot
    difference_nats: (
        float | None
    )  # the largest of a verdict's logit from the whole engine's; None if its adapters are others
    peak_memory_mib: float  # resident, of the engine's process


class TrafficRows(Strict):
    """One kind of traffic, and all its engines, the one that lacks nothing first."""

    traffic: str
    what: str  # in words
    runs: int  # of each engine
    rows: tuple[AblationRow, ...]


class AblationReport(BenchReport):
    """Everything in `runs/ablation_bench.json`."""

    engine: dict[str, str]
    traffics: tuple[TrafficRows, ...]


def table(report: AblationReport) -> str:
    """The report as text, as times of the engine that has everything."""
    width = max(len(row.variant) for traffic in report.traffics for row in traffic.rows)
    lines: list[str] = []
    for traffic in report.traffics:
        head = f"{traffic.traffic:<{width}} | {'ms (min to max)':>24} {'in steps':>9} {'of limit':>8} {'p95 ms':>7} {'tokens':>7} "
        head += f"{'read':>5} {'brought':>7} {'MiB':>6} | {'times':>6}"
        lines += [f"{traffic.traffic}: {traffic.what}", head, "-" * len(head)]
        for row in traffic.rows:
            wall = f"{row.wall_ms:.0f} ({row.wall_ms_min:.0f} to {row.wall_ms_max:.0f})"
            lines.append(
                f"{row.variant:<{width}} | {wall:>24} {row.engine_ms:>9.0f} {row.engine_ms / row.limit_ms:>8.2f} {row.p95_ms:>7.0f} "
                f"{row.computed_tokens:>7} {row.adapter_loads:>5} {row.swap_ins:>7} {row.peak_memory_mib:>6.0f} "
                f"| {row.wall_ms / traffic.rows[0].wall_ms:>6.2f}"
            )
        lines.append("")
    differences = [
        row.difference_nats
        for traffic in report.traffics
        for row in traffic.rows
        if row.difference_nats is not None
    ]
    notes = [
        "of limit: time in steps over that of the base alone: one prompt of the needed tokens, in the fleet every conversation.",
        "p95: of single verdicts, from the first question. read: adapters from disk. brought: into a slot.",
        "MiB: peak memory of the engine's process.",
        f"The largest difference of a verdict's logit from the whole engine's, with the same adapters: {max(differences):.2g} nats.",
    ]
    return "\n".join([*lines, *notes, caption(report)])


def caption(report: AblationReport) -> str:
    """Where the numbers come from, in one line."""
    runs = ", ".join(f"{traffic.runs} runs of {traffic.traffic}" for traffic in report.traffics)
    return f"{report.model} on {report.hardware}; commit {report.commit}; random aLoRAs; medians of {runs}."


def draw(report: AblationReport, path: Path) -> None:
    """Write the plot: a panel for each traffic, a bar for each engine."""
    counts = [len(traffic.rows) for traffic in report.traffics]
    figure = Figure(
        figsize=(8, 0.42 * sum(counts) + 0.9 * len(counts) + 0.7), dpi=150, layout="constrained"
    )
    panels = figure.subplots(
        len(counts), 1, squeeze=False, height_ratios=[count + 0.8 for count in counts]
    )[:, 0]
    for axes, traffic in zip(panels, report.traffics, strict=True):
        _panel(axes, traffic)
    figure.supxlabel("\n".join(textwrap.wrap(caption(report), 120)), fontsize=7, color="#444444")
    figure.savefig(path)


def _panel(axes: Axes, traffic: TrafficRows) -> None:
    rows = traffic.rows[::-1]
    spread = [
        [row.wall_ms - row.wall_ms_min for row in rows],
        [row.wall_ms_max - row.wall_ms for row in rows],
    ]
    axes.barh(
        [row.variant for row in rows],
        [row.wall_ms for row in rows],
        xerr=spread,
        color="#D55E00",
        alpha=0.8,
        ecolor="#444444",
    )
    axes.axvline(traffic.rows[0].wall_ms, color="#444444", linewidth=0.6, linestyle=":")
    axes.set_xscale("log")
    axes.set_title(f"{traffic.traffic}: {traffic.what}", fontsize=8, loc="left")
    axes.set_xlabel("ms to all verdicts")
    axes.grid(axis="x", linewidth=0.4, alpha=0.6)
