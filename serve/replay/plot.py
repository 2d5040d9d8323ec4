"""The probabilities of two versions against each other, and their differences, as one picture.

Knows nothing of files.
"""

from __future__ import annotations

import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from serve.replay.summary import Probabilities

BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#444444"  # of Okabe and Ito's palette
MAX_POINTS = 20_000  # beyond that a sample: the eye sees no difference, and drawing takes long
BINS = 51


def draw_replay(probabilities: Probabilities, thresholds: tuple[float, float], rule: str) -> bytes:
    """The picture as PNG: B's probability against A's with both thresholds, and a histogram of
    B's minus A's.

    Flips are in another colour, and drawn last. Needs at least one conversation.
    """
    figure = Figure(figsize=(9, 4), dpi=110, layout="constrained")
    scatter, histogram = figure.subplots(1, 2)
    _draw_points(scatter, probabilities, thresholds)
    changes = probabilities.b - probabilities.a
    edges = np.linspace(-1, 1, BINS + 1)
    histogram.hist(changes, bins=edges, color=BLUE, log=True, label="all")
    histogram.hist(changes[probabilities.flips], bins=edges, color=VERMILION, label="flipped")
    histogram.set(xlabel="p(B) - p(A)", ylabel="conversations")
    histogram.legend(fontsize=8)
    figure.suptitle(rule)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _draw_points(axes: Axes, probabilities: Probabilities, thresholds: tuple[float, float]) -> None:
    for is_flip, colour, label in ((False, BLUE, "same verdict"), (True, VERMILION, "flipped")):
        chosen = np.flatnonzero(probabilities.flips == is_flip)
        if len(chosen) > MAX_POINTS:
            chosen = np.random.default_rng(0).choice(chosen, MAX_POINTS, replace=False)
        axes.scatter(
            probabilities.a[chosen],
            probabilities.b[chosen],
            s=5,
            alpha=0.4,
            color=colour,
            linewidths=0,
            label=label,
        )
    axes.axvline(thresholds[0], color=GREY, linewidth=0.8, linestyle="--")
    axes.axhline(thresholds[1], color=GREY, linewidth=0.8, linestyle="--")
    axes.plot((0, 1), (0, 1), color=GREY, linewidth=0.5)
    axes.set(xlabel="p(A)", ylabel="p(B)", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    axes.legend(fontsize=8, loc="upper left")
