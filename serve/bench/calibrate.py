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
from serve.bench.harness import BenchCommand, add_count
from serve.bench.planning import (
    FLEET,
    HOST,
    SLOTS,
    BurstMeter,
    draw_bursts,
    scaffold_tokens,
    swap_rows,
    wake_ms,
    with_swaps,
)
from serve.bench.report import BenchReport, notes, origin
from serve.bench.workload.adapters import random_adapters
from serve.bench.workload.prompts import random_rule_text
from serve.engine import GuardEngine
from serve.plan.batching import MAX_SEQUENCES, STEP_TOKENS, ReplicaSizes
from serve.plan.calibration import BurstRow, DeviceCalibration, EngineSizes, fitted

BURSTS = 60  # by aLoRAs; a third as many by LoRAs, which take longer
QUICK_BURSTS = 12
RULES = 64  # of a check, at most
WARM_UP = 3


class CalibrationReport(BenchReport, DeviceCalibration):
    """The planner's file, written as the report of a benchmark."""


class CalibrateBench(BenchCommand):
    """The calibration."""

    name = "calibrate"
    summary = "what a step takes on this machine, for make plan -> runs/calibration.json"
    duration = "3 min"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        add_count(parser, "--bursts", BURSTS, "bursts by aLoRAs; a third as many by LoRAs")
        add_count(parser, "--rules", RULES, "the most rules of a check")

    def main(self) -> None:
        """Measure, write the file that `make plan` reads, print the table."""
        report, path = self.calibrated(), self.runs.root / "calibration.json"
        report.save(path)
        print(table(report))
        print(f"written: {path}")

    def calibrated(self) -> CalibrationReport:
        """Fit every adapter method of the recipe, on two engines, one after the other."""
        recipe, most_rules = self.recipe, self.options.rules
        methods = recipe.adapter_methods
        with random_adapters(recipe, methods, max(most_rules, FLEET)) as adapters:
            with GuardEngine(recipe, adapters, max_loras=len(adapters)) as engine:
                sizes = self._sizes(engine)
                rows: list[BurstRow] = []
                costs = {}
                for method in methods:
                    meter = BurstMeter(engine, recipe, limits_of(sizes, most_rules), method)
                    method_rows = self._run_bursts(meter, method)
                    rows += method_rows
                    costs[method] = fitted(method_rows)
                    costs[method] = costs[method].model_copy(update={"wake_ms": wake_ms(meter)})
            with GuardEngine(recipe, adapters, max_loras=SLOTS, max_cpu_loras=HOST) as engine:
                for method in methods:
                    costs[method] = with_swaps(swap_rows(engine, recipe, method), costs[method])
        return CalibrationReport(**origin(recipe), engine=sizes, methods=costs, bursts=tuple(rows))

    def _sizes(self, engine: GuardEngine) -> EngineSizes:
        prompts, block_size = PromptBuilder.of(self.recipe), engine.backend.block_size
        return EngineSizes(
            step_tokens=self.recipe.engine.get("max_num_batched_tokens", STEP_TOKENS),
            max_sequences=self.recipe.engine.get("max_num_seqs", MAX_SEQUENCES),
            block_size=block_size,
            cache_tokens=engine.backend.cache_tokens,
            scaffold_tokens=scaffold_tokens(prompts, block_size),
            suffix_tokens=len(prompts.suffix_ids(random_rule_text(self.recipe))),
        )

    def _run_bursts(self, meter: BurstMeter, method: str) -> list[BurstRow]:
        shares, bursts = METHODS[method].shares_conversation, self.options.bursts
        if self.options.quick:
            bursts = min(bursts, QUICK_BURSTS)
        if not shares:
            bursts = max(1, bursts // 3)
        drawn = draw_bursts(bursts, self.options.rules, seed=1, shares=shares)
        for burst in drawn[:WARM_UP]:  # the first time is always slow
            meter.run(burst)
        label = METHODS[method].label
        return [
            meter.run(burst) for burst in tqdm(drawn, desc=f"calibrating {label}", unit="burst")
        ]


def limits_of(sizes: EngineSizes, slots: int) -> ReplicaSizes:
    return ReplicaSizes(sizes.step_tokens, sizes.max_sequences, slots, sizes.block_size)


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
    return "\n".join([*lines, report.source])
