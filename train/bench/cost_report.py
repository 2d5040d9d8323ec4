"""Tables and picture of what training aLoRAs costs. Knows nothing of how it is measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from train.bench.workload import MEDIAN, SUFFIX, Base

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BATCH = 4  # rows of a step whose time is measured
TRL = "TRL + PEFT"
CACHED = "cached prefixes"
BLUE = "#0072B2"
YELLOW = "#E69F00"
RED = "#D55E00"
STEP_COLUMNS = (
    "base",
    "prefix",
    "TRL + PEFT",
    "cached, first epoch",
    "ratio",
    "cached, later",
    "ratio",
    "TRL + PEFT MiB",
    "cached MiB",
    "share",
)
RUN_COLUMNS = ("", "rules", "seconds", "of one rule on cached prefixes", "steps measured")


class Timing(NamedTuple):
    """Seconds over several processes; a list in the report."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """The median and the range of one value a process."""
        return cls(statistics.median(seconds), min(seconds), max(seconds))

    def __str__(self) -> str:
        median, lowest, highest = (f"{1000 * seconds:,.0f}" for seconds in self)
        return f"{median} ({lowest} to {highest})"


@dataclass(frozen=True)
class StepCell:
    """Seconds of a step of BATCH rows, each process's the median of its steps; peak MiB above the
    base.

    `cached_first_s` is a step of the first epoch, with computing its prefixes; `cached_s` one of a
    later epoch.
    """

    base: Base
    prefix: int
    suffix: int
    trl_s: Timing
    cached_first_s: Timing
    cached_s: Timing
    trl_mib: float
    cached_mib: float


@dataclass(frozen=True)
class RunCell:
    """Seconds to train `rules` rules on one pool of conversations, tiny base and recipe; `measured`
    is the share of steps done.
    """

    side: str  # TRL or CACHED
    rules: int
    seconds: float
    measured: float


def table(steps: Sequence[StepCell], runs: Sequence[RunCell]) -> str:
    """Both tables as Markdown, times as median (lowest to highest)."""
    cached = (run for run in runs if run.side == CACHED)
    one_rule = next(run for run in cached if run.rules == 1)
    lines = [
        f"A step of {BATCH} rows with a suffix of {SUFFIX} tokens, in ms; "
        "peak memory above the loaded base, in MiB.",
        "",
        *_markdown(STEP_COLUMNS, [_step_row(cell) for cell in steps]),
        "",
        f"Whole trainings on one pool of conversations, median {MEDIAN} tokens, "
        "tiny base and recipe.",
        "",
        *_markdown(RUN_COLUMNS, [_run_row(run, one_rule) for run in runs]),
    ]
    return "\n".join(lines)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (columns, *rows)]
    lines.insert(1, "|" + "---|" * len(columns))
    return lines


def _step_row(cell: StepCell) -> list[str]:
    return [
        cell.base,
        f"{cell.prefix:,}",
        str(cell.trl_s),
        str(cell.cached_first_s),
        f"{cell.trl_s.median / cell.cached_first_s.median:.1f}x",
        str(cell.cached_s),
        f"{cell.trl_s.median / cell.cached_s.median:.1f}x",
        f"{cell.trl_mib:,.0f}",
        f"{cell.cached_mib:,.0f}",
        f"{cell.cached_mib / cell.trl_mib:.0%}",
    ]


def _run_row(run: RunCell, one_rule: RunCell) -> list[str]:
    ratio = f"{run.seconds / one_rule.seconds:.1f}x"
    return [run.side, str(run.rules), f"{run.seconds:,.0f}", ratio, f"{run.measured:.0%}"]


def draw(steps: Sequence[StepCell], runs: Sequence[RunCell], path: Path) -> None:
    """Step time over the prefix's length, and the time of whole trainings over the number of
    rules.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    for base in dict.fromkeys(cell.base for cell in steps):
        _draw_steps(left, base, [cell for cell in steps if cell.base == base])
    left.set(xlabel="tokens of the conversation", ylabel=f"seconds a step of {BATCH} rows")
    _draw_runs(right, runs)
    right.set(xlabel="rules on one pool of conversations", ylabel="seconds")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        axes.legend(frameon=False, fontsize=8)
        axes.grid(linewidth=0.4, alpha=0.6)
    figure.savefig(path)


def _draw_steps(axes: Axes, base: Base, cells: Sequence[StepCell]) -> None:
    style = "-" if base == "tiny" else "--"
    prefixes = [cell.prefix for cell in cells]
    for name, colour, timings in (
        (TRL, BLUE, [cell.trl_s for cell in cells]),
        ("cached, first epoch", YELLOW, [cell.cached_first_s for cell in cells]),
        ("cached, later epochs", RED, [cell.cached_s for cell in cells]),
    ):
        medians = [timing.median for timing in timings]
        label = f"{name}, {base} base"
        axes.plot(prefixes, medians, style, marker="o", color=colour, label=label)


def _draw_runs(axes: Axes, runs: Sequence[RunCell]) -> None:
    cached = [run for run in runs if run.side == CACHED]
    trl = next(run for run in runs if run.side == TRL)
    rules = [run.rules for run in cached]
    seconds = [run.seconds for run in cached]
    axes.plot(rules, seconds, marker="o", color=RED, label=CACHED)
    one_by_one = [trl.seconds * count for count in rules]
    axes.plot(rules, one_by_one, "--", color=BLUE, label=f"{TRL}, one after another")
