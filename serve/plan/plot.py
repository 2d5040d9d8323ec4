"""A plan's plot: latency and cost against the rate at one replica. Knows no simulation."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from guard.method import METHODS
from serve.plan.report import CurvePoint, PlanReport

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {"lora": "#0072B2", "alora": "#D55E00"}
GREY = "#444444"


def draw(report: PlanReport, path: Path) -> None:
    """Write the plot: latency and cost against the rate at one replica."""
    canvas = Canvas(figsize=(9, 4.2), dpi=150, layout="constrained")
    latency, cost = canvas.subplots(1, 2)
    for method in dict.fromkeys(point.method for point in report.curve):
        points = [point for point in report.curve if point.method == method]
        _draw_latency(latency, method, points)
        rates = [point.rate for point in points]
        usd = [point.usd_per_million_checks for point in points]
        colour = COLOURS.get(method, GREY)
        cost.plot(rates, usd, "o-", color=colour, label=METHODS[method].label)
    latency.axhline(report.p95_target_ms, color=GREY, linestyle=":", label="p95 target")
    latency.set_ylabel("ms from arrival to the last verdict")
    cost.set_ylabel("USD for a million checks")
    _draw_judge(cost, report)
    for axes in (latency, cost):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("checks per second at one replica")
        axes.grid(linewidth=0.4, alpha=0.6, which="both")
        axes.legend(fontsize=8)
    caption = (
        f"{report.name}: {report.model} on {report.hardware}; simulated, none of the points was "
        f"measured. Coefficients: {report.source}. Commit {report.commit}."
    )
    canvas.supxlabel("\n".join(textwrap.wrap(caption, 150)), fontsize=7, color=GREY)
    canvas.savefig(path)


def _draw_latency(axes: Any, method: str, points: list[CurvePoint]) -> None:
    rates = [point.rate for point in points]
    colour, label = COLOURS.get(method, GREY), METHODS[method].label
    axes.plot(rates, [point.p50_ms for point in points], "o-", color=colour, label=f"{label}, p50")
    p95_ms = [point.p95_ms for point in points]
    axes.plot(rates, p95_ms, "^--", color=colour, label=f"{label}, p95")


def _draw_judge(axes: Any, report: PlanReport) -> None:
    """Draw what the judge costs, which is the same at any rate."""
    styles = iter((":", "-.", "--"))
    for row in report.section("cost").rows:
        if "price" not in row.figures:
            usd = row.figures["a million checks"].value
            axes.axhline(usd, color=GREY, linestyle=next(styles), linewidth=1, label=row.label)
