"""The reliability diagram of trained weights. Knows nothing of how the probabilities were made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

RELIABILITY = "reliability.png"


def draw_reliability(bins: Sequence[dict[str, Any]], title: str, folder: Path) -> None:
    """Draw `reliability.png`: the share that violates over the calibrated probability.

    DeGroot and Fienberg, 1983; bins as `validation.reliability` makes them.
    """
    # Takes half a second, and only finished weights need it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], linewidth=0.8, color="#888888")
    low = [max(0.0, row["violates"] - row["ci95"][0]) for row in bins]
    high = [max(0.0, row["ci95"][1] - row["violates"]) for row in bins]
    axes.errorbar(
        [row["p"] for row in bins],
        [row["violates"] for row in bins],
        yerr=[low, high],
        fmt="o",
        color="#D55E00",
        capsize=3,
        linewidth=1,
    )
    axes.set(
        xlim=(-0.02, 1.02),
        ylim=(-0.02, 1.02),
        xlabel="calibrated P(violation)",
        ylabel="share that violates (95 % interval)",
    )
    axes.set_title(title, fontsize=9)
    axes.grid(linewidth=0.4, alpha=0.6)
    figure.savefig(folder / RELIABILITY)
