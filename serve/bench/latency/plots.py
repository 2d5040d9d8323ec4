"""The latency benchmark's two plots. Knows nothing of engines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from serve.bench.latency.grid import BASE, label_of, method_that_repeats
from serve.bench.latency.report import LatencyReport, RatioRow, caption
from serve.bench.plot import (
    GREEN,
    GREY,
    METHOD_COLOURS,
    METHOD_MARKERS,
    plot_spreads,
)

LOWER_BOUND = "lower bound: one base prefill of the conversation and all suffixes"
LEGEND_INCHES = 7.5  # the width of the legend in one line
HEIGHT_INCHES = 5.2
CHARACTERS_PER_INCH = 17  # in the caption
VISIBLE_RATIO = 1.1  # below it the curves meet
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 12, "fontweight": "bold"}


def draw_length(report: LatencyReport, rules: int, path: Path) -> None:
    """Write the plot of wall time against the length of the conversation at `rules` rules."""
    figure = Figure(figsize=(8, HEIGHT_INCHES), dpi=150)
    axes = figure.add_subplot()
    rows = [row for row in report.ratios if row.rules == rules]
    rows.sort(key=lambda row: row.prompt_tokens)
    _draw_curves(axes, report, rows, [row.prompt_tokens for row in rows])
    axes.set_xlabel("length of the conversation, tokens")
    axes.set_title(f"{rules} rules on one conversation: time to all verdicts", **TITLE)
    _finish(figure, [axes], report, path)


def draw_rules(report: LatencyReport, lengths: Sequence[int], path: Path) -> None:
    """Write the plot of wall time against the number of rules, a panel for each length of the
    conversation.
    """
    figure = Figure(figsize=(5 * len(lengths) + 1, HEIGHT_INCHES), dpi=150)
    panels = [figure.add_subplot(1, len(lengths), number + 1) for number in range(len(lengths))]
    for axes, length in zip(panels, lengths, strict=True):
        rows = [row for row in report.ratios if row.prompt_tokens == length]
        rows.sort(key=lambda row: row.rules)
        _draw_curves(axes, report, rows, [row.rules for row in rows])
        axes.set_xlabel("rules on one conversation")
        axes.set_title(f"{length:,} tokens: time to all verdicts", **TITLE)
    _finish(figure, panels, report, path)


def _draw_curves(
    axes: Axes, report: LatencyReport, ratios: Sequence[RatioRow], x: Sequence[int]
) -> None:
    methods = [mode for mode in report.modes if mode != BASE]
    for mode in (*methods, BASE):
        spreads = [report.cell(row.prompt_tokens, row.rules, mode).wall_ms for row in ratios]
        looks = {
            "color": METHOD_COLOURS.get(mode, GREEN),
            "marker": METHOD_MARKERS.get(mode, "s"),
            "label": label_of(mode),
        }
        plot_spreads(axes, x, spreads, markersize=5, linewidth=2, **looks)
    bounds_ms = [row.lower_bound_ms for row in ratios]
    axes.plot(x, bounds_ms, color=GREY, linestyle="--", linewidth=1.2, label=LOWER_BOUND)
    for ratio, position in zip(ratios, x, strict=True):
        _annotate(axes, report, ratio, position)
    _set_log_axes(axes, x)


def _annotate(axes: Axes, report: LatencyReport, ratio: RatioRow, x: float) -> None:
    """Write at LoRA's point how many times as long it takes."""
    method = method_that_repeats(report.modes)
    if method is None or ratio.lora_over_alora is None:
        return
    speedup = ratio.lora_over_alora.median
    if speedup < VISIBLE_RATIO:
        return
    text = f"{speedup:.1f}x"
    if speedup >= 9.5:
        text = f"{speedup:.0f}x"
    wall_ms = report.cell(ratio.prompt_tokens, ratio.rules, method).wall_ms.median
    looks: dict[str, Any] = {"ha": "center", "fontsize": 9, "color": METHOD_COLOURS[method]}
    axes.annotate(text, (x, wall_ms), (0, 7), textcoords="offset points", **looks)


def _set_log_axes(axes: Axes, x: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(list(x), [f"{value:,}" for value in x])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(_duration))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.08, y=0.12)
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _finish(figure: Figure, panels: Sequence[Axes], report: LatencyReport, path: Path) -> None:
    """Add legend above and caption below, and write the file."""
    panels[0].set_ylabel("time to all verdicts")
    width, height = figure.get_size_inches()
    note = "Numbers: LoRA's time over aLoRA's. Bands: fastest and slowest repeat. "
    lines = textwrap.wrap(note + caption(report), int(width * CHARACTERS_PER_INCH))
    handles, labels = panels[0].get_legend_handles_labels()
    columns = 2
    if width > LEGEND_INCHES:
        columns = len(labels)
    top = 1 - 0.25 * math.ceil(len(labels) / columns) / height
    bottom = (0.14 * len(lines) + 0.14) / height
    figure.tight_layout(rect=(0, bottom, 1, top))
    looks: dict[str, Any] = {
        "loc": "upper left",
        "bbox_to_anchor": (0.01, 1.0),
        "frameon": False,
        "fontsize": 9,
    }
    figure.legend(handles, labels, ncols=columns, **looks)
    figure.text(0.012, 0.08 / height, "\n".join(lines), fontsize=7, color=GREY, va="bottom")
    figure.savefig(path)


def _duration(ms: float, _: object) -> str:
    if ms < 1000:
        return f"{ms:,.0f} ms"
    return f"{ms / 1000:,.3g} s"
