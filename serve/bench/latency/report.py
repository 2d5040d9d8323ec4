"""The latency benchmark's numbers: `runs/latency.json`, the table in the terminal, the two plots. Knows nothing of engines."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from guard.files.yaml_file import Strict, validate
from serve.bench.report import BenchReport

Mode = Literal["base", "lora", "alora"]
MODES: tuple[Mode, ...] = ("base", "lora", "alora")

# Okabe and Ito's palette, which colour-blind readers can tell apart
LOOKS: dict[Mode, tuple[str, str, str]] = {
    "lora": ("LoRA", "#0072B2", "o"),
    "alora": ("aLoRA", "#D55E00", "D"),
    "base": ("bare base model", "#009E73", "s"),
}
LIMIT = ("limit: one base prefill of the conversation and all suffixes", "#444444", "--")
LEGEND_INCHES = 7.5  # what the legend takes in one line


class CellRow(Strict):
    """One mode on one cell of the grid; times are medians over the repeats, in ms, all verdicts of one conversation."""

    prompt_tokens: (
        int  # before the rule turn: what the rules share; a repeat's lies within half a block of it
    )
    suffix_tokens: int  # mean over the rules
    rules: int
    mode: Mode
    wall_ms: float
    wall_ms_min: float
    wall_ms_max: float
    wall_ms_p95: float
    engine_ms: float  # the part of wall_ms inside vLLM's steps; the rest is tokenising and queueing
    mean_ms: float  # mean, median and 95th and 99th percentile of the single requests of all repeats, each from its submission
    p50_ms: float
    p95_ms: float
    p99_ms: float
    cached_tokens: int
    computed_tokens: int
    swap_ins: (
        int  # copied into a slot while the clock ran, the most of any repeat: each has its own
    )
    repeats: int


class RatioRow(Strict):
    """What one cell's modes say about each other, each a median of the repeats' own ratios; min and max are over the repeats."""

    prompt_tokens: int
    rules: int
    lora_over_alora: float  # wall times
    lora_over_alora_min: float
    lora_over_alora_max: float
    needed_tokens: int  # the conversation once, and every suffix
    limit_ms: float  # the base model prefilling one prompt of so many tokens
    limit_engine_ms: float  # the part of limit_ms inside vLLM's steps
    limit_measured_tokens: (
        int  # fewer if the needed ones exceed the context: limit_ms is then scaled by tokens
    )
    alora_over_limit: float  # wall time
    alora_engine_over_limit: float  # time inside vLLM's steps, of both
    alora_engine_over_limit_min: float
    alora_engine_over_limit_max: float


class FurtherRow(Strict):
    """What aLoRA's wall time grows by a rule, in ms: median over pairs of repeats, and its 95 % interval (bootstrap)."""

    prompt_tokens: int
    rules: int  # from so many rules
    up_to: int  # to so many
    ms: float
    ms_low: float
    ms_high: float


class LatencyReport(BenchReport):
    """Everything in `runs/latency.json`."""

    adapters: Literal["trained", "random weights"]
    engine: dict[str, str]
    inputs: str  # fingerprint of all the numbers depend on but the grid, which is `cells`
    left_out: tuple[str, ...]
    cells: tuple[CellRow, ...]
    ratios: tuple[RatioRow, ...]
    further: tuple[FurtherRow, ...]

    @classmethod
    def load(cls, path: Path) -> LatencyReport:
        """Read the file. Raises GuardError if it is not one of this version."""
        return validate(json.loads(path.read_text(encoding="utf-8")), cls, where=path)

    def cell(self, prompt_tokens: int, rules: int, mode: Mode) -> CellRow:
        """One row. Raises StopIteration if it was not measured."""
        return next(
            row
            for row in self.cells
            if (row.prompt_tokens, row.rules, row.mode) == (prompt_tokens, rules, mode)
        )


def table(report: LatencyReport) -> str:
    """The report as text: one line a cell, wall times with their spread, aLoRA's request latencies, the ratios."""
    head = f"{'tokens':>6} {'rules':>5} │ {'base':>8} {'LoRA':>9} {'aLoRA wall, ms (min…max)':>27} {'p95':>7} │ "
    head += f"{'p50':>7} {'p99':>7} │ "
    head += f"{'cached':>7} {'computed':>8} │ {'LoRA/aLoRA':>10} {'aLoRA/limit':>11} {'engine/limit (min…max)':>24}"
    lines = [head, "─" * len(head)]
    for ratio in sorted(report.ratios, key=lambda each: (each.prompt_tokens, each.rules)):
        base, lora, alora = (report.cell(ratio.prompt_tokens, ratio.rules, mode) for mode in MODES)
        wall = f"{alora.wall_ms:.0f} ({alora.wall_ms_min:.0f}…{alora.wall_ms_max:.0f})"
        engine = f"{ratio.alora_engine_over_limit:.2f}x ({ratio.alora_engine_over_limit_min:.2f}…{ratio.alora_engine_over_limit_max:.2f})"
        star = "*" if _is_scaled(ratio) else " "
        lines.append(
            f"{ratio.prompt_tokens:>6} {ratio.rules:>5} │ {base.wall_ms:>8.0f} {lora.wall_ms:>9.0f} {wall:>27} {alora.wall_ms_p95:>7.0f} │ "
            f"{alora.p50_ms:>7.0f} {alora.p99_ms:>7.0f} │ "
            f"{alora.cached_tokens:>7} {alora.computed_tokens:>8} │ "
            f"{ratio.lora_over_alora:>9.1f}x {ratio.alora_over_limit:>10.2f}x {engine:>24}{star}"
        )
    scaled = (
        "; * it is longer than the context, so measured at the longest prompt and scaled by tokens"
    )
    notes = [
        "wall: all verdicts of one conversation, median over the repeats, and their 95th percentile. p50, p99: the single aLoRA requests",
        f"of all repeats, from submission. A rule's own suffix has {_suffixes(report)} tokens. What the conversation has beyond whole",
        "blocks of the prefix cache (the repeats spread it evenly over 0 to a block) aLoRA computes once, the bare base for every rule.",
        "limit: the base model prefilling one prompt of as many tokens as the conversation and all suffixes have"
        + (scaled if any(_is_scaled(ratio) for ratio in report.ratios) else ""),
        f"adapters copied into a slot while the clock ran: {max(row.swap_ins for row in report.cells)}; "
        f"peak memory of the process: {report.peak_memory_mib:,.0f} MiB.",
        *(
            f"a rule more on {row.prompt_tokens:,} tokens, from {row.rules} to {row.up_to}: "
            f"{row.ms:.2f} ms ({row.ms_low:.2f} to {row.ms_high:.2f})"
            for row in report.further
        ),
        *(f"left out: {what}" for what in report.left_out),
        *(
            ["The longest conversations are beyond what the base was made for: times, no verdicts."]
            if "hf_overrides" in report.engine
            else []
        ),
        *(
            ["THE ADAPTERS HAVE RANDOM WEIGHTS: the times are real, the verdicts are not."]
            if report.adapters != "trained"
            else []
        ),
        caption(report),
    ]
    return "\n".join([*lines, *notes])


def _suffixes(report: LatencyReport) -> str:
    lengths = sorted({row.suffix_tokens for row in report.cells})
    return str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"


def caption(report: LatencyReport) -> str:
    """Where the numbers come from, in one line."""
    versions = ", ".join(
        f"{name} {version}"
        for name, version in report.versions.items()
        if name in ("vllm", "torch")
    )
    repeats = sorted({row.repeats for row in report.cells})
    weights = "" if report.adapters == "trained" else " Adapters with random weights."
    times = f"{repeats[0]}" if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
    return f"{report.model} on {report.hardware}; {versions}; commit {report.commit}; median of {times} repeats.{weights}"


def draw_length(report: LatencyReport, rules: int, path: Path) -> None:
    """Write the plot of wall time against the length of the conversation at `rules` rules."""
    figure = Figure(figsize=(8, 5.2), dpi=150)
    axes = figure.add_subplot()
    rows = sorted(
        (row for row in report.ratios if row.rules == rules), key=lambda row: row.prompt_tokens
    )
    _lines(axes, report, rows, [row.prompt_tokens for row in rows])
    axes.set_xlabel("length of the conversation, tokens")
    axes.set_title(
        f"{rules} rules on one conversation: time to all verdicts",
        loc="left",
        fontsize=12,
        fontweight="bold",
    )
    _finish(figure, [axes], report, path)


def draw_rules(report: LatencyReport, lengths: Sequence[int], path: Path) -> None:
    """Write the plot of wall time against the number of rules, a panel for each length of the conversation."""
    figure = Figure(figsize=(5 * len(lengths) + 1, 5.2), dpi=150)
    panels = [figure.add_subplot(1, len(lengths), number + 1) for number in range(len(lengths))]
    for axes, length in zip(panels, lengths, strict=True):
        rows = sorted(
            (row for row in report.ratios if row.prompt_tokens == length), key=lambda row: row.rules
        )
        _lines(axes, report, rows, [row.rules for row in rows])
        axes.set_xlabel("rules on one conversation")
        axes.set_title(
            f"{length:,} tokens: time to all verdicts", loc="left", fontsize=12, fontweight="bold"
        )
    _finish(figure, panels, report, path)


def _lines(axes: Axes, report: LatencyReport, ratios: Sequence[RatioRow], x: Sequence[int]) -> None:
    for mode, (label, colour, marker) in LOOKS.items():
        rows = [report.cell(ratio.prompt_tokens, ratio.rules, mode) for ratio in ratios]
        axes.fill_between(
            x,
            [row.wall_ms_min for row in rows],
            [row.wall_ms_max for row in rows],
            color=colour,
            alpha=0.18,
            linewidth=0,
        )
        axes.plot(
            x,
            [row.wall_ms for row in rows],
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=2,
            label=label,
        )
    label, colour, style = LIMIT
    axes.plot(
        x,
        [ratio.limit_ms for ratio in ratios],
        color=colour,
        linestyle=style,
        linewidth=1.2,
        label=label,
    )
    for ratio, place in zip(ratios, x, strict=True):
        if ratio.lora_over_alora < 1.1:
            continue  # the curves meet there
        lora = report.cell(ratio.prompt_tokens, ratio.rules, "lora").wall_ms
        text = (
            f"{ratio.lora_over_alora:.0f}x"
            if ratio.lora_over_alora >= 9.5
            else f"{ratio.lora_over_alora:.1f}x"
        )
        axes.annotate(
            text,
            (place, lora),
            (0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=LOOKS["lora"][1],
        )
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
    panels[0].set_ylabel("time to all verdicts")
    width, height = figure.get_size_inches()
    note = "Numbers: LoRA's time over aLoRA's. Bands: fastest and slowest repeat. " + caption(
        report
    )
    lines = textwrap.wrap(note, int(width * 17))
    handles, labels = panels[0].get_legend_handles_labels()
    columns = len(labels) if width > LEGEND_INCHES else 2
    top, bottom = (
        1 - 0.25 * math.ceil(len(labels) / columns) / height,
        (0.14 * len(lines) + 0.14) / height,
    )
    figure.tight_layout(rect=(0, bottom, 1, top))
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.01, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=9,
    )
    figure.text(0.012, 0.08 / height, "\n".join(lines), fontsize=7, color="#444444", va="bottom")
    figure.savefig(path)


def _duration(ms: float, _: object) -> str:
    return f"{ms:,.0f} ms" if ms < 1000 else f"{ms / 1000:,.3g} s"


def _is_scaled(ratio: RatioRow) -> bool:
    """Whether the limit's prompt was shorter than what it stands for, by more than a few tokens, as any may be."""
    return ratio.limit_measured_tokens < ratio.needed_tokens - 10
