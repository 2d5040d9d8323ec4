"""Calibrate the planner: the time of a step on this machine, from what it computes.

Bursts of checks of all sizes run on one engine, by aLoRA and by LoRA; coefficients are fitted to
them (`runs/calibration.json`). Then an engine with few slots shows what it costs if an adapter has
to be copied or read first. `make plan` reads the file. Adapters are random; verdicts mean nothing.
"""

from __future__ import annotations

import argparse

from tqdm import tqdm

from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count
from serve.bench.planning.bursts import BurstMeter, draw_bursts, scaffold_tokens
from serve.bench.planning.swaps import FLEET, HOST, SLOTS, with_swaps
from serve.bench.planning.wakes import wake_ms, wake_pairs
from serve.bench.report import BenchReport, notes, origin, publish, source
from serve.bench.workload.prompts import random_rule_text
from serve.bench.workload.random_adapter import by_name, random_adapters
from serve.engine import GuardEngine
from serve.plan.device.calibration import BurstRow, DeviceCalibration, EngineSizes, fitted
from serve.plan.replay.scheduler import MAX_SEQUENCES, STEP_TOKENS, StepLimits

BURSTS = 60  # by aLoRAs; a third as many by LoRAs, which take longer
RULES = 64  # of a check, at most
WARM_UP = 3
WAKES = 15  # pairs of a check after a pause and one without


class CalibrationReport(BenchReport, DeviceCalibration):
    """The planner's file, written as the report of a benchmark."""


def run(recipe: Recipe, bursts: int = BURSTS, most_rules: int = RULES) -> CalibrationReport:
    """Fit every adapter method of the recipe, on two engines, one after the other."""
    methods = recipe.adapter_methods
    with random_adapters(recipe, methods, max(most_rules, FLEET)) as folders:
        adapters = by_name(folders)
        with GuardEngine(recipe, adapters, max_loras=len(adapters)) as engine:
            sizes = _sizes(engine, recipe)
            rows: list[BurstRow] = []
            costs = {}
            for method in methods:
                meter = _meter(engine, recipe, sizes, method, most_rules)
                method_rows = _run_bursts(meter, method, bursts, most_rules)
                rows += method_rows
                wake = wake_ms(wake_pairs(meter, WAKES))
                costs[method] = fitted(method_rows).model_copy(update={"wake_ms": wake})
        with GuardEngine(recipe, adapters, max_loras=SLOTS, max_cpu_loras=HOST) as engine:
            for method in methods:
                costs[method] = with_swaps(engine, recipe, method, costs[method])
    return CalibrationReport(**origin(recipe), engine=sizes, methods=costs, bursts=tuple(rows))


def _sizes(engine: GuardEngine, recipe: Recipe) -> EngineSizes:
    prompts = PromptBuilder.of(recipe)
    return EngineSizes(
        step_tokens=recipe.engine.get("max_num_batched_tokens", STEP_TOKENS),
        max_sequences=recipe.engine.get("max_num_seqs", MAX_SEQUENCES),
        block_size=engine.backend.block_size,
        cache_tokens=engine.backend.cache_tokens,
        scaffold_tokens=scaffold_tokens(prompts, engine.backend.block_size),
        suffix_tokens=len(prompts.suffix_ids(random_rule_text(recipe))),
    )


def _meter(
    engine: GuardEngine, recipe: Recipe, sizes: EngineSizes, method: str, most_rules: int
) -> BurstMeter:
    shares = METHODS[method].shares_conversation
    limits = StepLimits(sizes.step_tokens, sizes.max_sequences, most_rules, sizes.block_size)
    return BurstMeter(engine, recipe, limits, method, shares=shares)


def _run_bursts(meter: BurstMeter, method: str, bursts: int, most_rules: int) -> list[BurstRow]:
    shares = METHODS[method].shares_conversation
    count = bursts if shares else max(1, bursts // 3)
    plans = draw_bursts(count, most_rules, seed=1, shares=shares)
    for plan in plans[:WARM_UP]:  # the first time is always slow
        meter.run(plan)
    label = METHODS[method].label
    return [meter.run(plan) for plan in tqdm(plans, desc=f"calibrating {label}", unit="burst")]


def table(report: CalibrationReport) -> str:
    """The report as text."""
    lines = [f"{'':>8} {'step ms':>8} {'ms/1,000 tokens':>15} {'ms/M pairs':>10} {'ms/rule':>8} | "]
    lines[0] += f"{'submit ms':>9} {'us/token':>8} {'us/rule':>8} | {'swap-in ms':>10} "
    lines[0] += f"{'disk ms':>7} {'wake ms':>7}"
    for method, cost in report.methods.items():
        step, submit = cost.step, cost.submit
        lines.append(
            f"{METHODS[method].label:>8} {step['steps']:>8.2f} {1000 * step['tokens']:>15.2f} "
            f"{1e6 * step['pairs']:>10.2f} {step['sequences']:>8.3f} | {submit['checks']:>9.2f} "
            f"{1000 * submit['conversation_tokens']:>8.2f} {1000 * submit['rules']:>8.1f} | "
            f"{cost.swap_in_ms:>10.2f} {cost.load_ms:>7.2f} {cost.wake_ms:>7.2f}"
        )
    for method, cost in report.methods.items():
        rows = [row for row in report.bursts if row.method == method]
        agree = sum(row.steps == row.work["steps"] for row in rows)
        lines.append(
            f"{METHODS[method].label}: {len(rows)} bursts, {agree} of them in as many steps as the "
            f"scheduler predicts; the median error of a burst's time is {cost.error:.1%}"
        )
        for text in cost.indistinct:
            lines.append(f"{METHODS[method].label}: not told from 0 by its standard error: {text}")
    lines += notes(
        "pairs: a token and one that it attends to. ms/rule: for a sequence in a step.",
        "swap-in: a copy into a slot; disk: a read from there, where nothing else runs; wake: the",
        "extra time of a check that finds the engine asleep.",
    )
    return "\n".join([*lines, source(report)])


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_count(parser, "--bursts", BURSTS, "bursts by aLoRAs; a third as many by LoRAs")
    add_count(parser, "--rules", RULES, "the most rules of a check")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the file that `make plan` reads, print the table."""
    report = run(load_recipe(arguments.model), arguments.bursts, arguments.rules)
    publish(report, arguments.runs / "calibration.json", table)
