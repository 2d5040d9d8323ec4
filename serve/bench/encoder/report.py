"""The encoder benchmark's numbers: `runs/encoder_bench.json`, the table in the terminal, and the
number of rules from which on reading the conversation once is faster.

Knows nothing of engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from guard.files.yaml_file import Strict
from guard.method import METHODS
from serve.bench.report import BenchReport, Spread, source

NOBODY = "none"  # no decoder beside the encoder

Weights = Literal["trained", "random weights"]


class EncoderCell(Strict):
    """The time that `rules` rules of a model's method took on conversations of `tokens` tokens.

    `tokens` are counted by the encoder's tokenizer; the decoder reads the same words.
    """

    model: str
    method: str
    tokens: int
    rules: int
    wall_ms: Spread
    computed_tokens: int  # in a repeat
    forward_passes: int | None = None  # in that repeat; older reports do not state them
    swap_ins: int  # while the clock ran, most of any repeat: each adapter has a slot of its own


class EncoderReport(BenchReport):
    """Everything in `runs/encoder_bench.json`."""

    inputs: str  # fingerprint of what the numbers depend on
    threads: int  # in each engine
    engine: dict[str, str]
    beside: str  # the decoder's recipe, or NOBODY
    engine_beside: dict[str, str]  # the decoder's settings; empty without one
    adapters: dict[str, dict[str, Weights]]  # by model and method, heads among them
    repeats: int
    cells: tuple[EncoderCell, ...]

    def adapter_method(self, model: str) -> str:
        """The model's method with adapters: one that shares conversations, if there is one."""
        names = dict.fromkeys(cell.method for cell in self.cells if cell.model == model)
        adapters = [METHODS[name] for name in names if METHODS[name].is_adapter]
        return max(adapters, key=lambda method: method.shares_conversation).name

    def line(self, model: str, method: str, tokens: int) -> list[EncoderCell]:
        """The cells of a model's method at one length, by number of rules."""
        cells: list[EncoderCell] = []
        for cell in self.cells:
            if (cell.model, cell.method, cell.tokens) == (model, method, tokens):
                cells.append(cell)
        return sorted(cells, key=lambda cell: cell.rules)


def table(report: EncoderReport) -> str:
    """The report as text."""
    lines = ["ms for N rules on one conversation, median (smallest to largest):"]
    counts = f"{'tokens':>8}{'rules':>8}{'computed':>10}{'passes':>8}"
    lines.append(f"{'model':<16}{'method':<8}{counts}  ms")
    for cell in report.cells:
        counts = f"{cell.tokens:>8,}{cell.rules:>8}{cell.computed_tokens:>10,}"
        counts += f"{cell.forward_passes or '':>8}"
        lines.append(f"{cell.model:<16}{cell.method:<8}{counts}  {cell.wall_ms.text(1)}")
    swap_ins = max(cell.swap_ins for cell in report.cells)
    lines.append(f"swap-ins while the clock ran: {swap_ins}; {_adapters(report)}")
    if report.beside != NOBODY:
        lines += _crossovers(report)
    return "\n".join(lines)


def _adapters(report: EncoderReport) -> str:
    """The methods by the kind of their weights: `trained: minilm lora, minilm head`."""
    names: dict[Weights, list[str]] = {}
    for model, weights_by_method in report.adapters.items():
        for method, weights in weights_by_method.items():
            names.setdefault(weights, []).append(f"{model} {method}")
    return "; ".join(f"{weights}: {', '.join(methods)}" for weights, methods in names.items())


def _crossovers(report: EncoderReport) -> list[str]:
    lines: list[str] = []
    for tokens in sorted({cell.tokens for cell in report.cells}):
        adapters = report.line(report.model, report.adapter_method(report.model), tokens)
        shared = report.line(report.beside, report.adapter_method(report.beside), tokens)
        rules = crossover(adapters, shared)
        where = "at no number of rules measured"
        if rules is not None:
            where = f"from {rules:.1f} rules on"
        lines.append(
            f"{tokens:,} tokens: aLoRAs on {report.beside} are faster than adapters on "
            f"{report.model} {where}"
        )
    return lines


def crossover(first: Sequence[EncoderCell], second: Sequence[EncoderCell]) -> float | None:
    """The number of rules from which on `second` is faster than `first`; None where it never is.

    Between the measured numbers, log ms is taken as linear in log rules. Where `second` is always
    faster, it is the smallest measured number.
    """
    before: tuple[float, float] | None = None
    for cell, second_cell in zip(first, second, strict=False):
        lead = math.log(cell.wall_ms.median / second_cell.wall_ms.median)
        if lead > 0 and before is None:
            return float(cell.rules)
        if lead > 0 and before is not None:
            start, deficit = before
            share = -deficit / (lead - deficit)
            return math.exp(start + share * (math.log(cell.rules) - start))
        before = math.log(cell.rules), lead
    return None


def caption(report: EncoderReport) -> str:
    """Where the numbers come from, in one line."""
    return f"{source(report)}; median of {report.repeats} repeats; {_adapters(report)}."
