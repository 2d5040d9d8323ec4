"""The results of the routing study as a table and a plot. Every number in them is computed."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from guard.files.yaml_file import Strict
from serve.plan.report import JsonReport

COLOURS = {"consistent hash": "#D55E00", "round-robin": "#0072B2"}
GREY = "#444444"
MARKERS = "os^Dv"


class RoutingRow(Strict):
    """One run; `RoutingOutcome` says what is counted.

    `churn`: the share of all replicas that is replaced each minute.
    """

    router: str
    turns: float
    churn: float
    replicas: int
    affinity: float
    hit_rate: float
    p50_ms: float
    p95_ms: float
    utilisation: float
    refused: float
    busiest: float
    counted: int


class RoutingReport(JsonReport):
    """Everything in `runs/routing.json`."""

    name: str
    commit: str
    hardware: str
    model: str
    method: str
    source: str
    conversations_an_hour: int
    think_s: float
    max_ongoing: int
    rows: tuple[RoutingRow, ...]


def table(report: RoutingReport) -> str:
    """The report as text."""
    head = (
        f"{'replicas':>8} {'turns':>5} {'churn/min':>9} {'router':>15} | {'affinity':>8} "
        f"{'hits':>6} {'p50 ms':>7} {'p95 ms':>8} {'at work':>7} {'refused':>7} {'busiest':>7}"
    )
    lines = [head, "-" * len(head)]
    for row in report.rows:
        lines.append(
            f"{row.replicas:>8,} {row.turns:>5g} {row.churn:>9.0%} {row.router:>15} | "
            f"{row.affinity:>8.1%} {row.hit_rate:>6.1%} {row.p50_ms:>7.1f} {row.p95_ms:>8.1f} "
            f"{row.utilisation:>7.1%} {row.refused:>7.2%} {row.busiest:>7.2f}"
        )
    note = (
        "All computed. affinity: later turns at the replica of the turn before. hits: tokens that "
        "were in the replica's cache, of those that an earlier turn had computed. refused: turns "
        "whose first replica had no place. busiest: the busiest replica's work over the mean."
    )
    return "\n".join([*lines, *textwrap.wrap(note, 110), caption(report)])


def caption(report: RoutingReport) -> str:
    """What was simulated, in one line."""
    return (
        f"{report.conversations_an_hour:,} conversations an hour, a turn every {report.think_s:g} "
        f"s, {report.name}: {report.model} on {report.hardware}, coefficients {report.source}; "
        f"commit {report.commit}."
    )


def draw(report: RoutingReport, path: Path) -> None:
    """Write the plot: hits and p95 against turns, a line for every churn and router."""
    most = max(row.replicas for row in report.rows)
    canvas = Canvas(figsize=(9, 4.2), dpi=150, layout="constrained")
    hits, latency = canvas.subplots(1, 2)
    churns = sorted({row.churn for row in report.rows})
    for router, colour in COLOURS.items():
        for marker, churn in zip(MARKERS, churns, strict=False):
            rows = [
                row
                for row in report.rows
                if (row.router, row.churn, row.replicas) == (router, churn, most)
            ]
            looks: dict[str, Any] = {"color": colour, "marker": marker, "linewidth": 1}
            turns = [row.turns for row in rows]
            label = f"{router}, {churn:.0%} replaced a minute"
            hits.plot(turns, [100 * row.hit_rate for row in rows], label=label, **looks)
            latency.plot(turns, [row.p95_ms for row in rows], label=label, **looks)
    hits.set_ylabel("% of an earlier turn's tokens in the cache")
    latency.set_ylabel("ms, 95th percentile")
    for axes in (hits, latency):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("turns of a conversation, mean")
        axes.grid(linewidth=0.4, alpha=0.6)
        axes.set_ylim(bottom=0)
    hits.legend(fontsize=7)
    text = f"{most:,} replicas, computed. {caption(report)}"
    canvas.supxlabel("\n".join(textwrap.wrap(text, 150)), fontsize=7, color=GREY)
    canvas.savefig(path)
