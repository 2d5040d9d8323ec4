"""Open-loop load: conversations arrive by a Poisson process, whether or not the server is ready.

Conversations are as long as those of the Schema-Guided Dialogue data set, each with 5 to 20 rules.
What counts is the time from a conversation's arrival to its last verdict. All methods get the same
traffic in one engine, one after the other. A method that is saturated at a rate is left out at
higher ones: its queue would only grow with the length of the run. Knows nothing of what the
verdicts mean.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from guard.example import Message
from guard.files.yaml_file import Strict
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count
from serve.bench.plot import METHOD_COLOURS, new_figure, save_figure
from serve.bench.report import (
    BenchReport,
    engine_settings,
    notes,
    origin,
    percentiles,
    publish,
    source,
)
from serve.bench.scores import scores_of_calls
from serve.bench.workload.prompts import conversation, random_rule_text, wordings
from serve.bench.workload.random_adapter import by_name, random_adapters
from serve.bench.workload.traffic import Done, Timed, open_loop, poisson
from serve.engine import Call, GuardEngine, ScoreRequest

RATES = (1.0, 2.0, 4.0, 8.0, 16.0)  # conversations per second
CHECKS_PER_RATE = 200  # conversations at each rate
RULES = (5, 20)  # of a conversation, least and most
REPEATS = 3  # runs at each rate, each with traffic of its own
SATURATED_GROWTH = 2.0
WARM_UP_RATE, WARM_UP_CHECKS = 1000.0, 8
# The 0, 5, 10, … 100 % quantiles of the prompts' lengths in the tiny base's tokens:
# every eighth of SGD's 17,193 dialogues (Rastogi et al., 2020).
# fmt: off
LENGTHS = (87, 163, 185, 206, 221, 236, 251, 265, 278, 289, 302, 315, 326, 339, 354, 371, 392, 416,
           443, 490, 740)
# fmt: on
MEDIAN_LENGTH = LENGTHS[len(LENGTHS) // 2]


class LoadRow(Strict):
    """One method at one rate, all runs.

    Latencies from a conversation's arrival to its last verdict.

    `growth` is the median latency of the last third of a run's conversations over that of the
    first; the median of the runs.
    """

    method: str
    offered_per_second: float
    answered_per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    growth: float
    verdicts: int
    computed_tokens: int
    needed_tokens: int
    swap_ins: int  # while the clock ran; every adapter has a slot of its own

    @property
    def is_saturated(self) -> bool:
        """Whether the queue grew for the whole run: requests come faster than they are answered."""
        return self.growth >= SATURATED_GROWTH


class LoadReport(BenchReport):
    """Everything in `runs/load_bench.json`."""

    checks: int
    repeats: int
    rules: tuple[int, int]
    engine: dict[str, str]
    rows: tuple[LoadRow, ...]


@dataclass(frozen=True)
class Arrival:
    """A conversation, when it arrives in seconds from the start, and the numbers of its rules."""

    messages: tuple[Message, ...]
    due_s: float
    rules: tuple[int, ...]


def arrivals(
    prompts: PromptBuilder, rate: float, checks: int, seed: int, rules: tuple[int, int] = RULES
) -> list[Arrival]:
    """Conversations of real lengths, by a Poisson process of `rate` a second; no two seeds have one
    in common.

    `rules`: how many each is put to, least and most; there are no more than the most.
    """
    least, most = rules
    draw = random.Random(seed)
    quantiles = np.linspace(0, 100, len(LENGTHS))
    lengths = [
        round(float(np.interp(draw.uniform(0, 100), quantiles, LENGTHS))) for _ in range(checks)
    ]
    drawn = []
    for number, due_s in enumerate(poisson(rate, checks, seed)):
        messages = conversation(prompts, lengths[number], (seed << 32) + number)
        count = draw.randint(least, most)
        drawn.append(Arrival(messages, due_s, tuple(draw.sample(range(most), count))))
    return drawn


@dataclass(frozen=True)
class LoadRun:
    """One method under one run of traffic."""

    offered_per_second: float
    timed: Timed
    verdicts: int
    computed_tokens: int
    needed_tokens: int
    swap_ins: int

    @property
    def growth(self) -> float:
        """How much longer the last third of the conversations waited than the first."""
        third = max(1, len(self.timed.latencies_s) // 3)
        first, last = self.timed.latencies_s[:third], self.timed.latencies_s[-third:]
        return float(np.median(last) / np.median(first))


class LoadDriver:
    """Puts traffic to a running engine, each conversation to `rules[0]` to `rules[1]` rules."""

    def __init__(self, engine: GuardEngine, recipe: Recipe, rules: tuple[int, int] = RULES) -> None:
        self._engine, self._prompts, self._rules = engine, PromptBuilder.of(recipe), rules
        # What the rules' adapters read
        self._texts = wordings([random_rule_text(recipe)], rules[1])

    def traffic(self, rate: float, checks: int, seed: int) -> list[Arrival]:
        """A run's conversations."""
        return arrivals(self._prompts, rate, checks, seed, self._rules)

    def run(self, method: str, traffic: Sequence[Arrival]) -> LoadRun:
        """Put the conversations to the method's adapters as they arrive.

        Raises GuardError if a request is refused.
        """
        self._engine.forget()
        swap_ins_before = self._engine.swap_ins
        calls: list[Call] = []

        def submit(number: int) -> Done:
            call = self._engine.submit(self._requests(method, traffic[number]))
            calls.append(call)
            return lambda: call.done

        timed = open_loop(submit, self._engine.step, [arrival.due_s for arrival in traffic])
        scores = scores_of_calls(calls, where=method)
        return LoadRun(
            offered_per_second=len(traffic) / traffic[-1].due_s,
            timed=timed,
            verdicts=len(scores),
            computed_tokens=sum(score.computed_tokens for score in scores),
            needed_tokens=sum(self._needed(arrival) for arrival in traffic),
            swap_ins=self._engine.swap_ins - swap_ins_before,
        )

    def _requests(self, method: str, arrival: Arrival) -> list[ScoreRequest]:
        return [
            ScoreRequest(arrival.messages, self._texts[rule], f"{method}-{rule}")
            for rule in arrival.rules
        ]

    def _needed(self, arrival: Arrival) -> int:
        """Tokens of the conversation once, and of every suffix."""
        suffixes = sum(len(self._prompts.suffix_ids(self._texts[rule])) for rule in arrival.rules)
        return len(self._prompts.prefix_ids(arrival.messages)) + suffixes


def run(
    recipe: Recipe,
    rates: Sequence[float] = RATES,
    checks: int = CHECKS_PER_RATE,
    repeats: int = REPEATS,
    rules: tuple[int, int] = RULES,
) -> LoadReport:
    """All adapter methods, in one engine, at every rate up to the first that saturates them."""
    methods = recipe.adapter_methods
    total = len(rates) * len(methods) * repeats * checks
    with (
        random_adapters(recipe, methods, rules[1]) as folders,
        tqdm(total=total, desc="measuring", unit="check") as bar,
        GuardEngine(recipe, by_name(folders), max_loras=len(by_name(folders))) as engine,
    ):
        driver = LoadDriver(engine, recipe, rules)
        rows = _rows(driver, methods, rates, checks, repeats, bar)
    return LoadReport(
        **origin(recipe),
        checks=checks,
        repeats=repeats,
        rules=rules,
        engine=engine_settings(recipe),
        rows=tuple(rows),
    )


def _rows(
    driver: LoadDriver,
    methods: Sequence[str],
    rates: Sequence[float],
    checks: int,
    repeats: int,
    bar: tqdm,
) -> list[LoadRow]:
    for method in methods:  # first times are slow everywhere
        warm_up = driver.traffic(WARM_UP_RATE, min(checks, WARM_UP_CHECKS), seed=0)
        driver.run(method, warm_up)
    rows: list[LoadRow] = []
    for number, rate in enumerate(rates):
        saturated = {row.method for row in rows if row.is_saturated}
        unsaturated = [method for method in methods if method not in saturated]
        seeds = range(1 + number * repeats, 1 + (number + 1) * repeats)
        runs = _runs(driver, unsaturated, rate, checks, seeds, bar)
        rows += [_row(method, runs[method]) for method in unsaturated]
        bar.update(len(saturated) * repeats * checks)
    return rows


def _runs(
    driver: LoadDriver,
    methods: Sequence[str],
    rate: float,
    checks: int,
    seeds: Sequence[int],
    bar: tqdm,
) -> dict[str, list[LoadRun]]:
    """A run of every method for each seed, the methods interleaved."""
    every_traffic = [driver.traffic(rate, checks, seed) for seed in seeds]
    runs: dict[str, list[LoadRun]] = {method: [] for method in methods}
    orders = (methods[::-1], methods)
    for repeat, traffic in enumerate(every_traffic):
        for method in orders[repeat % 2]:
            bar.set_postfix_str(f"{rate:g} per second, {METHODS[method].label}", refresh=False)
            runs[method].append(driver.run(method, traffic))
            bar.update(checks)
    return runs


def _row(method: str, runs: Sequence[LoadRun]) -> LoadRow:
    latencies_ms: list[float] = []
    for run in runs:
        latencies_ms += [1000 * latency for latency in run.timed.latencies_s]
    return LoadRow(
        method=method,
        offered_per_second=float(np.median([run.offered_per_second for run in runs])),
        answered_per_second=float(np.median([run.timed.per_second for run in runs])),
        **percentiles(latencies_ms),
        growth=float(np.median([run.growth for run in runs])),
        verdicts=sum(run.verdicts for run in runs),
        computed_tokens=sum(run.computed_tokens for run in runs),
        needed_tokens=sum(run.needed_tokens for run in runs),
        swap_ins=sum(run.swap_ins for run in runs),
    )


def table(report: LoadReport) -> str:
    """The report as text."""
    head = (
        f"{'offered/s':>9} {'method':>7} | {'answered/s':>10} {'p50 ms':>8} {'p95 ms':>8} "
        f"{'p99 ms':>8} {'growth':>6} | {'tokens/verdict':>14} {'of needed':>9} {'swap-ins':>8}"
    )
    lines = [head, "-" * len(head)]
    lines += [_line(row) for row in report.rows]
    lines += notes(
        "A request is a conversation with its rules.",
        "p50, p95, p99: from its arrival to its last verdict.",
        "growth: how much longer the last third of a run's requests waited than the first;",
        f"from {SATURATED_GROWTH:g} on the method is saturated.",
        "of needed: tokens computed over the needed ones (every conversation once, and every",
        "rule's suffix). swap-ins: adapters copied into a slot.",
    )
    return "\n".join([*lines, caption(report)])


def _line(row: LoadRow) -> str:
    line = (
        f"{row.offered_per_second:>9.1f} {METHODS[row.method].label:>7} | "
        f"{row.answered_per_second:>10.1f} {row.p50_ms:>8.0f} {row.p95_ms:>8.0f} "
        f"{row.p99_ms:>8.0f} {row.growth:>6.1f} | {row.computed_tokens / row.verdicts:>14.0f} "
        f"{row.computed_tokens / row.needed_tokens:>9.1%} {row.swap_ins:>8}"
    )
    if row.is_saturated:
        line += f"  saturated at {row.answered_per_second:.1f} requests/s"
    return line


def caption(report: LoadReport) -> str:
    """Where the numbers come from, in one line."""
    least, most = report.rules
    return (
        f"{report.repeats} runs of {report.checks} conversations at each rate, Poisson arrivals, "
        f"{LENGTHS[0]} to {LENGTHS[-1]} tokens (median {MEDIAN_LENGTH}), "
        f"{least} to {most} rules each; {source(report)}; random adapters."
    )


def draw(report: LoadReport, path: Path) -> None:
    """Write the plot: median and 95th percentile of the latency against the offered rate."""
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    for method in dict.fromkeys(row.method for row in report.rows):
        rows = [row for row in report.rows if row.method == method]
        rates = [row.offered_per_second for row in rows]
        colour, label = METHOD_COLOURS[method], METHODS[method].label
        p50_ms, p95_ms = [row.p50_ms for row in rows], [row.p95_ms for row in rows]
        axes.plot(rates, p50_ms, color=colour, marker="o", label=f"{label}, median")
        axes.plot(rates, p95_ms, color=colour, marker="^", linestyle="--", label=f"{label}, 95 %")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("offered load: conversations per second")
    axes.set_ylabel("ms from arrival to the last verdict")
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.legend()
    save_figure(figure, caption(report), path)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_count(parser, "--checks", CHECKS_PER_RATE, "conversations at each rate")
    add_count(parser, "--repeats", REPEATS, "runs at each rate")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and the plot, print the table."""
    recipe = load_recipe(arguments.model)
    report = run(recipe, checks=arguments.checks, repeats=arguments.repeats)
    publish(report, arguments.runs / "load_bench.json", table, draw)
