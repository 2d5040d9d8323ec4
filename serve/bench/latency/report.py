"""The latency benchmark's numbers: `runs/latency.json` and the table in the terminal.

Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from guard.files.yaml_file import Strict
from serve.bench.latency.grid import BASE, label_of, method_that_shares
from serve.bench.report import FEWEST_FOR_P95, BenchReport, Spread, notes, source


class CellRow(Strict):
    """One mode on one cell of the grid. Times are medians over the repeats, for all verdicts of one
    conversation.

    `prompt_tokens`: the tokens before the rule turn, which the rules share; a repeat has up to half
    a block more or fewer. `mean_ms` and the percentiles are those of the single requests of all
    repeats, each from its submission.
    """

    prompt_tokens: int
    suffix_tokens: int  # in the mode's prompts, mean over the rules
    rules: int
    mode: str  # "base" or a method
    wall_ms: Spread
    engine_ms: float  # the part of wall_ms inside vLLM's steps; the rest is tokenising and queueing
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    cached_tokens: int
    computed_tokens: int
    swap_ins: int  # while the clock ran, most of any repeat: each adapter has a slot of its own
    repeats: int


class RatioRow(Strict):
    """The ratios between one cell's modes, each a spread over the repeats.

    The ratio of a method that was not measured is None. If the needed tokens exceed the context,
    the lower bound was measured with fewer and is scaled by tokens.
    """

    prompt_tokens: int
    rules: int
    lora_over_alora: Spread | None  # wall times
    needed_tokens: int  # the conversation once, and every suffix
    lower_bound_ms: float  # the bare base prefills one prompt of so many tokens
    lower_bound_engine_ms: float  # the part of it inside vLLM's steps
    lower_bound_measured_tokens: int
    alora_over_lower_bound: float | None  # wall times, the median
    alora_engine_over_lower_bound: Spread | None  # times inside vLLM's steps, of both

    @property
    def is_scaled(self) -> bool:
        """Whether the lower bound's prompt was clearly shorter than what it stands for. Any prompt
        may be a few tokens shorter.
        """
        return self.lower_bound_measured_tokens < self.needed_tokens - 10


class MarginalCostRow(Strict):
    """By how much a further rule increases aLoRA's wall time: the median over pairs of repeats, and
    its 95 % interval (bootstrap), None where there are too few pairs for one.
    """

    prompt_tokens: int
    from_rules: int
    to_rules: int
    ms_per_rule: float
    ms_low: float | None
    ms_high: float | None
    pairs: int | None = None  # older files do not state it

    def __str__(self) -> str:
        cost = (
            f"marginal cost per rule on {self.prompt_tokens:,} tokens, from {self.from_rules} to "
            f"{self.to_rules} rules: {self.ms_per_rule:.2f} ms"
        )
        if self.ms_low is None or self.ms_high is None:
            pairs = "1 pair" if self.pairs == 1 else f"{self.pairs} pairs"
            return f"{cost} ({pairs} of repeats: too few for an interval)"
        return f"{cost} ({self.ms_low:.2f} to {self.ms_high:.2f})"


class LatencyReport(BenchReport):
    """Everything in `runs/latency.json`.

    `inputs`: a fingerprint of everything that the numbers depend on, except the grid, which is in
    `cells`. `threads`: those of the engine.
    """

    threads: int | None = None  # older files do not state it
    adapters: Literal["trained", "random weights"]
    engine: dict[str, str]
    inputs: str
    left_out: tuple[str, ...]
    cells: tuple[CellRow, ...]
    ratios: tuple[RatioRow, ...]
    marginal_costs: tuple[MarginalCostRow, ...]

    def cell(self, prompt_tokens: int, rules: int, mode: str) -> CellRow:
        """One row. Raises StopIteration if it was not measured."""
        return next(
            row
            for row in self.cells
            if (row.prompt_tokens, row.rules, row.mode) == (prompt_tokens, rules, mode)
        )

    @property
    def modes(self) -> list[str]:
        """The bare base and the methods that were measured."""
        return list(dict.fromkeys(row.mode for row in self.cells))

    @property
    def detailed_mode(self) -> str:
        """The mode that the table shows in detail: the method that shares, else the last one."""
        return method_that_shares(self.modes) or self.modes[-1]

    @property
    def other_modes(self) -> list[str]:
        """The modes of which the table shows only the wall time."""
        return [mode for mode in self.modes if mode != self.detailed_mode]

    @property
    def has_wall_p95(self) -> bool:
        """Whether the detailed mode has a p95 of its wall times on any cell."""
        rows = [row for row in self.cells if row.mode == self.detailed_mode]
        return any(row.wall_ms.p95 is not None for row in rows)


def table(report: LatencyReport) -> str:
    """The report as text. Each line is a cell: the wall times, for the detailed mode their spread
    and its request latencies, and the ratios.
    """
    columns = "".join(f"{label_of(mode):>10}" for mode in report.other_modes)
    detailed = f"{label_of(report.detailed_mode)} wall, ms (min to max)"
    p95 = f" {'p95':>7}" if report.has_wall_p95 else ""
    head = (
        f"{'tokens':>6} {'rules':>5} │{columns} {detailed:>29}"
        f"{p95} │ {'p50':>7} {'p99':>7} │ {'cached':>7} {'computed':>8} │ "
        f"{'LoRA/aLoRA':>10} {'/lower bound':>12} {'engine/lower bound (min to max)':>31}"
    )
    lines = [head, "─" * len(head)]
    for ratio in sorted(report.ratios, key=lambda row: (row.prompt_tokens, row.rules)):
        lines.append(_line(report, ratio))
    return "\n".join([*lines, *_notes(report), caption(report)])


def _line(report: LatencyReport, ratio: RatioRow) -> str:
    walls = ""
    for mode in report.other_modes:
        wall_ms = report.cell(ratio.prompt_tokens, ratio.rules, mode).wall_ms
        walls += f"{wall_ms.median:>10.0f}"
    row = report.cell(ratio.prompt_tokens, ratio.rules, report.detailed_mode)
    p95 = ""
    if report.has_wall_p95:
        p95 = f" {_whole(row.wall_ms.p95):>7}"
    return (
        f"{ratio.prompt_tokens:>6} {ratio.rules:>5} │{walls} {row.wall_ms.text():>29}"
        f"{p95} │ {row.p50_ms:>7.0f} {row.p99_ms:>7.0f} │ "
        f"{row.cached_tokens:>7} {row.computed_tokens:>8} │ {_ratios(ratio)}"
    )


def _whole(ms: float | None) -> str:
    """The time in whole ms; nothing where it is not stated."""
    return "" if ms is None else f"{ms:.0f}"


def _ratios(ratio: RatioRow) -> str:
    speedup, wall, engine, star = "", "", "", ""
    if ratio.lora_over_alora is not None:
        speedup = f"{ratio.lora_over_alora.median:.1f}x"
    if ratio.alora_over_lower_bound is not None:
        wall = f"{ratio.alora_over_lower_bound:.2f}x"
    if ratio.alora_engine_over_lower_bound is not None:
        engine = ratio.alora_engine_over_lower_bound.text(2, "x")
    if ratio.is_scaled:
        star = "*"
    return f"{speedup:>10} {wall:>12} {engine:>31}{star}"


def _notes(report: LatencyReport) -> list[str]:
    """The meaning of the columns, and what a reader has to know about this run."""
    swap_ins = max(row.swap_ins for row in report.cells)
    method_tokens = _suffix_tokens(report, [mode for mode in report.modes if mode != BASE])
    base_tokens = _suffix_tokens(report, [BASE])
    suffixes = f"A rule's own suffix has {method_tokens} tokens."
    if base_tokens != method_tokens:
        suffixes += f" The bare base's, which carries the rule's title, has {base_tokens}."
    wall = "wall: all verdicts of one conversation, median over the repeats."
    if report.has_wall_p95:
        wall += f" p95: that of the repeats, where there are {FEWEST_FOR_P95} or more."
    lines = notes(
        wall,
        "p50, p99: the single requests of all repeats, from submission.",
        f"{suffixes} What the conversation has beyond",
        "whole blocks of the prefix cache (the repeats spread it evenly over 0 to a block) aLoRA",
        "computes once, the bare base for every rule. lower bound: the bare base prefilling one",
        "prompt of as many tokens as the conversation and all suffixes have.",
    )
    if any(ratio.is_scaled for ratio in report.ratios):
        lines.append("* longer than the context: measured at the longest prompt, scaled by tokens.")
    lines.append(
        f"swap-ins while the clock ran: {swap_ins}; "
        f"peak memory of the process: {report.peak_memory_mib:,.0f} MiB."
    )
    lines += [str(row) for row in report.marginal_costs]
    lines += [f"left out: {cell}" for cell in report.left_out]
    if "hf_overrides" in report.engine:
        lines.append(
            "The longest conversations are beyond what the base was made for: times, no verdicts."
        )
    if report.adapters != "trained":
        lines.append("THE ADAPTERS HAVE RANDOM WEIGHTS: the times are real, the verdicts are not.")
    return lines


def _suffix_tokens(report: LatencyReport, modes: Sequence[str]) -> str:
    return _range({row.suffix_tokens for row in report.cells if row.mode in modes})


def _range(counts: set[int]) -> str:
    if len(counts) == 1:
        return str(min(counts))
    return f"{min(counts)} to {max(counts)}"


def caption(report: LatencyReport) -> str:
    """Where the numbers come from, in one line."""
    versions = [f"{name} {report.versions[name]}" for name in ("vllm", "torch")]
    repeats = _range({row.repeats for row in report.cells})
    text = f"{source(report)}; {', '.join(versions)}; median of {repeats} repeats."
    if report.adapters != "trained":
        text += " Adapters with random weights."
    return text
