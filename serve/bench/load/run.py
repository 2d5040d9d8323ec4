"""Open-loop load: conversations arrive by a Poisson process, whether or not the server is ready.

Conversations are as long as those of the Schema-Guided Dialogue data set, each with 5 to 20 rules.
What counts is the time from a conversation's arrival to its last verdict. All methods get the same
traffic in one engine, one after the other. A method that is saturated at a rate is left out at
higher rates: its queue would only grow with the length of the run. Knows nothing of what the
verdicts mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from guard.method import METHODS
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count
from serve.bench.load.measure import LoadDriver, LoadRun
from serve.bench.load.plot import draw
from serve.bench.load.report import LoadReport, LoadRow, table
from serve.bench.report import engine_settings, origin, percentiles, publish
from serve.bench.workload.arrivals import RULES
from serve.bench.workload.random_adapter import by_name, random_adapters
from serve.engine import GuardEngine

RATES = (1.0, 2.0, 4.0, 8.0, 16.0)  # conversations per second
CHECKS_PER_RATE = 200  # conversations at each rate
REPEATS = 3  # runs at each rate, each with traffic of its own
WARM_UP_RATE, WARM_UP_CHECKS = 1000.0, 8


def run(
    recipe: Recipe,
    rates: Sequence[float] = RATES,
    checks: int = CHECKS_PER_RATE,
    repeats: int = REPEATS,
    rules: tuple[int, int] = RULES,
) -> LoadReport:
    """Measure all adapter methods in one engine, at rates up to the first that saturates them."""
    methods = recipe.adapter_methods
    total = len(rates) * len(methods) * repeats * checks
    with (
        random_adapters(recipe, methods, rules[1]) as folders,
        tqdm(total=total, desc="measuring", unit="check") as bar,
        GuardEngine(recipe, by_name(folders), max_loras=len(by_name(folders))) as engine,
    ):
        driver = LoadDriver(engine, recipe, rules)
        rows = _measure_rates(driver, methods, rates, checks, repeats, bar)
    return LoadReport(
        **origin(recipe),
        checks=checks,
        repeats=repeats,
        rules=rules,
        engine=engine_settings(recipe),
        rows=tuple(rows),
    )


def _measure_rates(
    driver: LoadDriver,
    methods: Sequence[str],
    rates: Sequence[float],
    checks: int,
    repeats: int,
    bar: tqdm,
) -> list[LoadRow]:
    for method in methods:  # the first time is always slow
        warm_up = driver.traffic(WARM_UP_RATE, min(checks, WARM_UP_CHECKS), seed=0)
        driver.run(method, warm_up)
    rows: list[LoadRow] = []
    for number, rate in enumerate(rates):
        saturated = {row.method for row in rows if row.is_saturated}
        unsaturated = [method for method in methods if method not in saturated]
        seeds = range(1 + number * repeats, 1 + (number + 1) * repeats)
        runs = _run_methods(driver, unsaturated, rate, checks, seeds, bar)
        rows += [_row(method, runs[method]) for method in unsaturated]
        bar.update(len(saturated) * repeats * checks)
    return rows


def _run_methods(
    driver: LoadDriver,
    methods: Sequence[str],
    rate: float,
    checks: int,
    seeds: Sequence[int],
    bar: tqdm,
) -> dict[str, list[LoadRun]]:
    """Run every method once for each seed, the methods interleaved."""
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


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_count(parser, "--checks", CHECKS_PER_RATE, "conversations at each rate")
    add_count(parser, "--repeats", REPEATS, "runs at each rate")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and the plot, print the table."""
    recipe = load_recipe(arguments.model)
    report = run(recipe, checks=arguments.checks, repeats=arguments.repeats)
    publish(report, arguments.runs / "load_bench.json", table, draw)
