"""Open-loop load: conversations arrive by a Poisson process, whether or not the server is ready.

Conversations are as long as those of the Schema-Guided Dialogue data set, each with 5 to 20 rules.
What counts is the time from a conversation's arrival to its last verdict. All methods get the same
traffic in one engine, one after the other. A method that is saturated at a rate is left out at
higher rates: its queue would only grow with the length of the run. Knows nothing of what the
verdicts mean.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from guard.prompt.decoder import PromptBuilder
from serve.bench.engines import scores_of_calls
from serve.bench.harness import Benchmark, Cell, Repeat, Sample, add_count
from serve.bench.report import Column, GridReport
from serve.bench.workload.adapters import random_adapters
from serve.bench.workload.prompts import random_rule_text, wordings
from serve.bench.workload.traffic import RULES, Arrival, arrivals, open_loop
from serve.engine import Call, GuardEngine, ScoreRequest

RATES: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)  # conversations per second
CHECKS_PER_RATE = 200  # conversations at each rate
QUICK_RATES, QUICK_CHECKS = (2.0, 8.0), 30
WARM_UP_RATE, WARM_UP_CHECKS = 1000.0, 8
SATURATED_GROWTH = 2.0


@dataclass(frozen=True, kw_only=True)
class LoadCell(Cell):
    """A method at a rate of arrivals, in conversations per second."""

    rate: float
    method: str


class LoadBench(Benchmark[LoadCell]):
    """Open-loop load on one engine."""

    name = "load"
    summary = "open-loop load: Poisson arrivals at rising rates, until a method is saturated"
    duration = "41 min, --quick 1"
    columns = (
        Column("rate", "rate"),
        Column("offered/s", "offered_per_second", 1),
        Column("", "method"),
        Column("answered/s (min to max)", "answered_per_second", 1, "spread"),
        Column("ms", "check_ms"),
        Column("p95", "check_ms", part="p95"),
        Column("p99", "check_ms", part="p99"),
        Column("growth", "growth", 1),
        Column("tokens/verdict", "tokens_per_verdict"),
        Column("/needed", "of_needed", 2, unit="x"),
        Column("swap-ins", "swap_ins", part="max"),
    )
    rules: tuple[int, int] = RULES  # of a conversation, the least and the most

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        add_count(parser, "--checks", CHECKS_PER_RATE, "conversations at each rate")

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._prompts = PromptBuilder.of(self.recipe)
        # The texts that the rules' adapters read.
        self._texts = wordings([random_rule_text(self.recipe)], self.rules[1])
        self._checks: int = options.checks
        if options.quick:
            self._checks = min(self._checks, QUICK_CHECKS)
        self.facts |= {"conversations": self._checks, "adapters": "with random weights"}

    def cells(self) -> list[LoadCell]:
        rates, repeats = RATES, self.options.repeats
        if self.options.quick:
            rates, repeats = QUICK_RATES, 1
        grid = itertools.product(rates, self.recipe.adapter_methods)
        return [LoadCell(rate=rate, method=method, repeats=repeats) for rate, method in grid]

    def skipped(self, cell: LoadCell, samples: Mapping[LoadCell, Sequence[Sample]]) -> str:
        for lower, of_lower in samples.items():
            growths = [sample["growth"] for sample in of_lower]
            if lower.method == cell.method and np.median(growths) >= SATURATED_GROWTH:
                return f"{lower.rate:g} conversations a second saturate it"
        return ""

    @contextlib.contextmanager
    def started(self, cells: Sequence[LoadCell]) -> Iterator[None]:
        methods = self.recipe.adapter_methods
        with (
            random_adapters(self.recipe, methods, self.rules[1]) as adapters,
            GuardEngine(self.recipe, adapters, max_loras=len(adapters)) as self._engine,
        ):
            for method in methods:  # the first time is always slow
                traffic = arrivals(self._prompts, WARM_UP_RATE, WARM_UP_CHECKS, 0, self.rules)
                self._run(method, traffic)
            yield

    def measure(self, cell: LoadCell, repeat: Repeat) -> Sample:
        traffic = arrivals(self._prompts, cell.rate, self._checks, repeat.seed, self.rules)
        return self._run(cell.method, traffic)

    def _run(self, method: str, traffic: Sequence[Arrival]) -> Sample:
        self._engine.forget()
        swap_ins_before = self._engine.counters.swap_ins
        calls: list[Call] = []

        def submit(number: int) -> Call:
            calls.append(self._engine.submit(self._requests(method, traffic[number])))
            return calls[-1]

        timed = open_loop(submit, self._engine.step, [arrival.due_s for arrival in traffic])
        scores = scores_of_calls(calls, where=method)
        computed = sum(score.computed_tokens for score in scores)
        return {
            "offered_per_second": len(traffic) / traffic[-1].due_s,
            "answered_per_second": timed.per_second,
            "check_ms": [1000 * latency for latency in timed.latencies_s],
            "growth": growth(timed.latencies_s),
            "verdicts": len(scores),
            "tokens_per_verdict": computed / len(scores),
            "of_needed": computed / sum(self._needed(arrival) for arrival in traffic),
            "swap_ins": self._engine.counters.swap_ins - swap_ins_before,
        }

    def _requests(self, method: str, arrival: Arrival) -> list[ScoreRequest]:
        texts, messages = self._texts, arrival.messages
        return [ScoreRequest(messages, texts[rule], f"{method}-{rule}") for rule in arrival.rules]

    def _needed(self, arrival: Arrival) -> int:
        """The needed tokens: the conversation's once, and those of every suffix."""
        suffixes = sum(len(self._prompts.suffix_ids(self._texts[rule])) for rule in arrival.rules)
        return len(self._prompts.prefix_ids(arrival.messages)) + suffixes

    def notes(self, report: GridReport) -> list[str]:
        sentences: list[str] = []
        for row in report.rows:
            if row.median("growth") >= SATURATED_GROWTH:
                rate = row.median("answered_per_second")
                sentences.append(f"{row.cell['method']} is saturated at {rate:.1f} a second.")
        return [
            *sentences,
            "ms, p95, p99: from a conversation's arrival to its last verdict.",
            "growth: how much longer the last third of a run's conversations waited than the",
            f"first; from {SATURATED_GROWTH:g} on the method is saturated. /needed: tokens",
            "computed over the needed ones (every conversation once, and every rule's suffix).",
        ]


def growth(latencies_s: Sequence[float]) -> float:
    """The median latency of the last third of the conversations over that of the first."""
    third = max(1, len(latencies_s) // 3)
    return statistics.median(latencies_s[-third:]) / statistics.median(latencies_s[:third])
