"""The quality table as a picture: one dot with its interval per rule and contender.

Knows nothing of how they were measured.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from eval.contender import BAG_OF_WORDS, is_baseline, label_of
from eval.evaluation import Evaluation
from guard.files.atomic import atomic_write

# Okabe and Ito's palette, which colour-blind readers can tell apart; the markers differ too.
BAG_MARK = ("#000000", "v")
JUDGE_MARKS = (("#7f7f7f", "s"), ("#b0b0b0", "p"))
METHOD_MARKS = (
    ("#0072B2", "o"),
    ("#D55E00", "D"),
    ("#009E73", "^"),
    ("#CC79A7", "P"),
    ("#E69F00", "X"),
    ("#56B4E9", "d"),
)
LEGEND_COLUMNS = 3
LEGEND_INCHES = 0.2  # a row
INCHES_PER_ROW = 0.16  # of one contender
INCHES_BETWEEN_RULES = 0.14
CAPTION_INCHES = 0.16  # a line


@dataclass(frozen=True)
class Look:
    """How a contender is drawn; `offset` is its distance from the middle of the row, in rows."""

    label: str
    colour: str
    marker: str
    offset: float


def draw(
    evaluations: Sequence[Evaluation],
    mean_accuracy: Mapping[str, float],
    caption: str,
    path: Path,
) -> None:
    """Write a PNG: accuracy in percent with 95 % intervals from left to right, rules from top to
    bottom, the mean last.
    """
    names = [evaluation.rule for evaluation in evaluations]
    if len(evaluations) > 1:
        names.append("mean")
    has_seeds = any(len(evaluation.seeds) > 1 for evaluation in evaluations)
    if has_seeds:
        caption = f"Ticks are single seeds. {caption}"
    lines = textwrap.wrap(caption, 140)
    row_inches = INCHES_BETWEEN_RULES + INCHES_PER_ROW * len(mean_accuracy)
    legend = LEGEND_INCHES * math.ceil(len(mean_accuracy) / LEGEND_COLUMNS)
    height = 1.3 + legend + row_inches * len(names) + CAPTION_INCHES * len(lines)
    figure = Figure(figsize=(8, height), dpi=150)
    axes = figure.add_subplot()
    for contender, look in looks(evaluations).items():
        _draw_contender(axes, evaluations, contender, look)
        if len(evaluations) > 1:
            accuracy, row = 100 * mean_accuracy[contender], len(evaluations) + look.offset
            _dot(axes, accuracy, row, look, markersize=8, markeredgecolor="black")
    if len(evaluations) > 1:
        axes.axhline(len(evaluations) - 0.5, color="black", linewidth=0.6)
    _label_axes(axes, names)
    bottom = (0.6 + CAPTION_INCHES * len(lines)) / height
    figure.subplots_adjust(left=0.24, right=0.97, top=1 - (0.2 + legend) / height, bottom=bottom)
    figure.text(0.02, 0.08 / height, "\n".join(lines), fontsize=7, color="#444444", va="bottom")
    with atomic_write(path) as part:
        figure.savefig(part, format="png")


def marks(contenders: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each contender."""
    judge_marks, method_marks = itertools.cycle(JUDGE_MARKS), itertools.cycle(METHOD_MARKS)
    by_contender = {}
    for contender in contenders:
        if contender == BAG_OF_WORDS:
            by_contender[contender] = BAG_MARK
        elif is_baseline(contender):
            by_contender[contender] = next(judge_marks)
        else:
            by_contender[contender] = next(method_marks)
    return by_contender


def looks(evaluations: Sequence[Evaluation]) -> dict[str, Look]:
    """How each contender is drawn."""
    contenders = list(evaluations[0].methods)
    by_contender = {}
    for rank, (contender, (colour, marker)) in enumerate(marks(contenders).items()):
        label = label_of(contender)
        if contender in evaluations[0].judges:
            names = [evaluation.judges[contender].name for evaluation in evaluations]
            label = f"judge: {', '.join(dict.fromkeys(names))}"
        offset = (rank - (len(contenders) - 1) / 2) * 0.66 / len(contenders)
        by_contender[contender] = Look(label, colour, marker, offset)
    return by_contender


def _draw_contender(
    axes: Any, evaluations: Sequence[Evaluation], contender: str, look: Look
) -> None:
    """A dot, its interval and its seeds on every rule's row."""
    for row, evaluation in enumerate(evaluations):
        quality = evaluation.methods[contender]
        at = row + look.offset
        interval = [100 * edge for edge in quality.accuracy_ci95]
        style = {"linewidth": 1.8, "alpha": 0.55, "solid_capstyle": "round"}
        axes.plot(interval, [at, at], color=look.colour, **style)
        if len(quality.seeds) > 1:
            accuracies = [100 * seed.accuracy for seed in quality.seeds.values()]
            ticks = {"marker": "|", "markersize": 7, "linestyle": ""}
            axes.plot(accuracies, [at] * len(accuracies), color=look.colour, **ticks)
        label = look.label if row == 0 else None
        _dot(axes, 100 * quality.accuracy, at, look, markersize=6, label=label)


def _dot(axes: Any, accuracy: float, row: float, look: Look, **style: Any) -> None:
    axes.plot(accuracy, row, marker=look.marker, color=look.colour, linestyle="", **style)


def _label_axes(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(right=101)
    axes.set_xlabel("accuracy on the test split, %, with 95 % interval")
    axes.grid(axis="x", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=LEGEND_COLUMNS, frameon=False, fontsize=8
    )
