"""The quality table as a picture: one dot with its interval per rule and method. Knows nothing of how they were measured."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from eval.evaluation import CONTENDERS, Contender, Evaluation

# Okabe and Ito's palette, which colour-blind readers can tell apart; the markers differ too
LOOKS: dict[Contender, tuple[str, str, str]] = {
    "judge": ("judge", "#7f7f7f", "s"),
    "lora": ("LoRA", "#0072B2", "o"),
    "alora": ("aLoRA", "#D55E00", "D"),
}
INCHES_PER_RULE = 0.62


def draw(
    evaluations: Sequence[Evaluation],
    mean_accuracy: Mapping[Contender, float],
    caption: str,
    path: Path,
) -> None:
    """Write a PNG: accuracy in percent with 95 % intervals from left to right, rules from top to bottom, the mean last."""
    judges = ", ".join(dict.fromkeys(each.judge.name for each in evaluations))
    names = [each.rule for each in evaluations] + ["mean"] * (len(evaluations) > 1)
    seeds = "Ticks are single seeds. " if any(len(each.seeds) > 1 for each in evaluations) else ""
    lines = textwrap.wrap(seeds + caption, 140)
    height = 1.5 + INCHES_PER_RULE * len(names) + 0.16 * len(lines)
    figure = Figure(figsize=(8, height), dpi=150)
    axes = figure.add_subplot()
    for place, method in enumerate(CONTENDERS):
        label, colour, marker = LOOKS[method]
        label = f"{label}: {judges}" if method == "judge" else label
        offset = (place - 1) * 0.22
        for row, each in enumerate(evaluations):
            quality = each.methods[method]
            low, high = (100 * edge for edge in quality.accuracy_ci95)
            axes.plot(
                [low, high],
                [row + offset] * 2,
                color=colour,
                linewidth=1.8,
                alpha=0.55,
                solid_capstyle="round",
            )
            if len(quality.seeds) > 1:
                for seed in quality.seeds.values():
                    axes.plot(
                        100 * seed.accuracy, row + offset, marker="|", color=colour, markersize=7
                    )
            axes.plot(
                100 * quality.accuracy,
                row + offset,
                marker=marker,
                color=colour,
                markersize=6,
                label=None if row else label,
                linestyle="",
            )
        if len(evaluations) > 1:
            mean_row = len(evaluations) + offset
            axes.plot(
                100 * mean_accuracy[method],
                mean_row,
                marker=marker,
                color=colour,
                markersize=8,
                markeredgecolor="black",
                linestyle="",
            )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    if len(evaluations) > 1:
        axes.axhline(len(evaluations) - 0.5, color="black", linewidth=0.6)
    axes.set_xlim(right=101)
    axes.set_xlabel("accuracy on the test split, %, with 95 % interval")
    axes.grid(axis="x", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False)
    figure.subplots_adjust(
        left=0.24, right=0.97, top=1 - 0.4 / height, bottom=(0.6 + 0.16 * len(lines)) / height
    )
    figure.text(0.02, 0.08 / height, "\n".join(lines), fontsize=7, color="#444444", va="bottom")
    figure.savefig(path)
