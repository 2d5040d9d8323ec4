"""The reliability diagram of an adapter. Knows nothing of how the probabilities were made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

RELIABILITY = "reliability.png"


def draw_reliability(bins: Sequence[dict[str, Any]], title: str, folder: Path) -> None:
    """`reliability.png`: the share that violates over the calibrated probability (DeGroot and Fienberg, 1983).

    Bins as `calibrate.reliability` makes them.
    """
    from matplotlib.figure import (
        Figure,
    )  # takes half a second, and only a finished adapter needs it

    figure = Figure(figsize=(4.2, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], linewidth=0.8, color="#888888")
    low = [max(0.0, one["violates"] - one["ci95"][0]) for one in bins]
    high = [max(0.0, one["ci95"][1] - one["violates"]) for one in bins]
    axes.errorbar(
        [one["p"] for one in bins],
        [one["violates"] for one in bins],
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
