"""The planner compared with a measured load at five rates that it was not fitted to.

The load is open-loop, as in `make bench NAME=load`: Poisson arrivals, the lengths of SGD's
dialogues, 5 to 20 rules each. The planner simulates the same arrivals, and arrivals that it draws
itself from the same distributions. It uses coefficients of bursts that run in between, because a
shared machine is not the same an hour later, and those of `runs/calibration.json`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from guard.errors import GuardError
from guard.files.yaml_file import Strict
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count
from serve.bench.load.measure import LoadDriver
from serve.bench.planning.bursts import BurstMeter, draw_bursts
from serve.bench.planning.wakes import WakePair, wake_ms, wake_pairs
from serve.bench.plot import BLUE, VERMILION, new_figure, save_figure
from serve.bench.report import BenchReport, notes, origin, percentile, publish, source
from serve.bench.workload.arrivals import LENGTHS, RULES, Arrival
from serve.bench.workload.random_adapter import by_name, random_adapters
from serve.engine import GuardEngine
from serve.plan.device.calibration import (
    COMMAND,
    BurstRow,
    DeviceCalibration,
    EngineSizes,
    FittedCost,
    fitted,
    load_calibration,
)
from serve.plan.device.step_cost import StepWork
from serve.plan.replay.replica import Replay, ReplicaSimulation, ReplicaSizes
from serve.plan.replay.scheduler import StepLimits
from serve.plan.traffic.arrival import CheckArrival
from serve.plan.traffic.generate import TrafficShape, draw_traffic

SHARES = (0.2, 0.4, 0.6, 0.75, 0.9)  # of the rate at which the planner says that it saturates
CHECKS, REPEATS = 250, 2
DRAWN = 4000  # number of checks that the planner draws itself
WARM_UP_CHECKS = 30
BURSTS, WAKES = 8, 3  # between two runs
BURST_RULES = 64  # of a check, at most
FIRST_SEED = 501
AIM_P50, AIM_P95 = 0.20, 0.30
# Names of RateRow's predictions in the table. `make plan` without a trace draws arrivals too.
PREDICTIONS = {
    "replayed": "planned",
    "filed": "by the calibration's file",
    "drawn": "drawn by the planner",
}


class RateRow(Strict):
    """The latencies at one rate, as measured and as the planner predicts them.

    `replayed`: for the same arrivals, by coefficients of the bursts between these runs. `filed`:
    for the same arrivals, by the calibration's file. `drawn`: for other arrivals from the same
    distributions.
    """

    offered_per_second: float
    measured_p50_ms: float
    measured_p95_ms: float
    replayed_p50_ms: float
    replayed_p95_ms: float
    filed_p50_ms: float
    filed_p95_ms: float
    drawn_p50_ms: float
    drawn_p95_ms: float

    def error(self, percent: str, by: str = "replayed") -> float:
        """The relative error of a predicted percentile, `p50` or `p95`."""
        planned: float = getattr(self, f"{by}_{percent}_ms")
        measured: float = getattr(self, f"measured_{percent}_ms")
        return planned / measured - 1

    def is_within_aim(self, by: str = "replayed") -> bool:
        """Whether the errors of both percentiles are within the aim."""
        return abs(self.error("p50", by)) <= AIM_P50 and abs(self.error("p95", by)) <= AIM_P95


class PlanValidation(BenchReport):
    """Everything in `runs/plan_bench.json`.

    `cost`: the coefficients of the bursts between the runs. `drift`: how much longer these bursts
    took than the calibration's file predicts, in the median.
    """

    method: str
    checks: int
    repeats: int
    rules: tuple[int, int]
    saturation_per_second: float
    cost: FittedCost
    drift: float
    calibration_commit: str
    calibration_hardware: str
    rows: tuple[RateRow, ...]


class PlannedReplica:
    """The planner's replica with one method's coefficients and the engine's sizes."""

    def __init__(self, sizes: EngineSizes, cost: FittedCost, method: str) -> None:
        most = RULES[1]
        limits = StepLimits(sizes.step_tokens, sizes.max_sequences, most, sizes.block_size)
        self._sizes = ReplicaSizes(limits, sizes.cache_tokens, most, most, sizes.scaffold_tokens)
        self._cost, self._suffix = cost, sizes.suffix_tokens
        self._shares = METHODS[method].shares_conversation
        self._shape = TrafficShape(LENGTHS, RULES, most)

    def replay(self, arrivals: Sequence[CheckArrival]) -> Replay:
        """Simulate the arrivals, from an empty cache."""
        simulation = ReplicaSimulation(self._sizes, self._cost, self._suffix, shares=self._shares)
        return simulation.run(arrivals)

    def latencies_s(self, runs: Sequence[Sequence[CheckArrival]]) -> list[float]:
        """The simulated latencies of all runs, each from an empty cache."""
        latencies: list[float] = []
        for arrivals in runs:
            latencies += self.replay(arrivals).latencies_s.tolist()
        return latencies

    def drawn(self, rate: float) -> Replay:
        """Simulate arrivals that the planner draws."""
        return self.replay(draw_traffic(self._shape, rate, DRAWN, seed=0).arrivals)

    @property
    def saturation_per_second(self) -> float:
        """The rate, in checks per second, at which a queue that is never empty is answered."""
        return self.drawn(1e6).per_second


@dataclass
class MeasuredRate:
    """The runs at one rate: their arrivals, and the measured latencies of all runs."""

    rate: float
    runs: list[list[CheckArrival]] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)


def as_planned(prompts: PromptBuilder, traffic: Sequence[Arrival]) -> list[CheckArrival]:
    """The load's conversations as the planner reads them: tokens and times, without words."""
    planned = []
    for number, arrival in enumerate(traffic):
        tokens = len(prompts.prefix_ids(arrival.messages))
        planned.append(CheckArrival(arrival.due_s, number, tokens, arrival.rules))
    return planned


def run(
    recipe: Recipe,
    calibration: DeviceCalibration,
    method: str,
    checks: int = CHECKS,
    repeats: int = REPEATS,
) -> PlanValidation:
    """Measure every rate, in `repeats` rounds over all of them, and simulate each."""
    if calibration.model != recipe.name:
        problem = "the calibration is of another model"
        raise GuardError(problem, got=calibration.model, remedy=f"Run `{COMMAND} MODEL=…`")
    filed = PlannedReplica(calibration.engine, calibration.cost(method), method)
    saturation = filed.saturation_per_second
    rates = [MeasuredRate(share * saturation) for share in SHARES]
    bursts, wakes = _measure(recipe, calibration.engine, method, rates, checks, repeats)
    cost = fitted(bursts).model_copy(update={"wake_ms": wake_ms(wakes)})
    fresh = PlannedReplica(calibration.engine, cost, method)
    return PlanValidation(
        **origin(recipe),
        method=method,
        checks=checks,
        repeats=repeats,
        rules=RULES,
        saturation_per_second=saturation,
        cost=cost,
        drift=_drift(bursts, calibration.cost(method)),
        calibration_commit=calibration.commit,
        calibration_hardware=calibration.hardware,
        rows=tuple(_row(rate, fresh, filed) for rate in rates),
    )


def _measure(
    recipe: Recipe,
    sizes: EngineSizes,
    method: str,
    rates: Sequence[MeasuredRate],
    checks: int,
    repeats: int,
) -> tuple[list[BurstRow], list[WakePair]]:
    """Fill the rates with runs. Returns the bursts and the wakes.

    These run between the runs, so that a slower minute of the machine affects all of them.
    """
    prompts, shares = PromptBuilder.of(recipe), METHODS[method].shares_conversation
    limits = StepLimits(sizes.step_tokens, sizes.max_sequences, BURST_RULES, sizes.block_size)
    plans = draw_bursts(BURSTS * repeats * len(rates), BURST_RULES, seed=2, shares=shares)
    bursts: list[BurstRow] = []
    wakes: list[WakePair] = []
    with (
        random_adapters(recipe, [method], BURST_RULES) as folders,
        tqdm(total=len(rates) * repeats * checks, desc="measuring", unit="check") as bar,
        GuardEngine(recipe, by_name(folders), max_loras=BURST_RULES) as engine,
    ):
        driver = LoadDriver(engine, recipe)
        meter = BurstMeter(engine, recipe, limits, method, shares=shares)
        driver.run(method, driver.traffic(rates[-1].rate, WARM_UP_CHECKS, seed=0))
        for number in range(repeats * len(rates)):
            rate = rates[number % len(rates)]
            traffic = driver.traffic(rate.rate, checks, FIRST_SEED + number)
            bursts += [meter.run(plan) for plan in plans[BURSTS * number : BURSTS * (number + 1)]]
            wakes += wake_pairs(meter, WAKES)
            rate.latencies_s += driver.run(method, traffic).timed.latencies_s
            rate.runs.append(as_planned(prompts, traffic))
            bar.update(checks)
    return bursts, wakes


def _drift(bursts: Sequence[BurstRow], cost: FittedCost) -> float:
    ratios = []
    for burst in bursts:
        ratios.append(burst.steps_ms / cost.step_ms(StepWork(**burst.work)))  # type: ignore[arg-type]
    return statistics.median(ratios) - 1


def _row(rate: MeasuredRate, fresh: PlannedReplica, filed: PlannedReplica) -> RateRow:
    replayed_s, filed_s = fresh.latencies_s(rate.runs), filed.latencies_s(rate.runs)
    drawn = fresh.drawn(rate.rate)
    return RateRow(
        offered_per_second=rate.rate,
        measured_p50_ms=1000 * percentile(rate.latencies_s, 50),
        measured_p95_ms=1000 * percentile(rate.latencies_s, 95),
        replayed_p50_ms=1000 * percentile(replayed_s, 50),
        replayed_p95_ms=1000 * percentile(replayed_s, 95),
        filed_p50_ms=1000 * percentile(filed_s, 50),
        filed_p95_ms=1000 * percentile(filed_s, 95),
        drawn_p50_ms=drawn.percentile_ms(50),
        drawn_p95_ms=drawn.percentile_ms(95),
    )


def table(report: PlanValidation) -> str:
    """The report as text."""
    head = f"{'offered/s':>9} "
    for percent in ("p50", "p95"):
        head += f"| {percent + ' ms':>7} {'planned':>7} {'off by':>7} {'file':>7} {'drawn':>7} "
    lines = [head, "-" * len(head)]
    for row in report.rows:
        line = f"{row.offered_per_second:>9.1f} "
        for percent in ("p50", "p95"):
            measured, planned, filed, drawn = (
                getattr(row, f"{by}_{percent}_ms")
                for by in ("measured", "replayed", "filed", "drawn")
            )
            line += f"| {measured:>7.0f} {planned:>7.0f} {row.error(percent):>+7.0%} "
            line += f"{filed / measured - 1:>+7.0%} {drawn:>7.0f} "
        lines.append(line)
    for by, name in PREDICTIONS.items():
        within = sum(row.is_within_aim(by) for row in report.rows)
        lines.append(
            f"{name}: {within} of {len(report.rows)} rates within {AIM_P50:.0%} at p50 and "
            f"{AIM_P95:.0%} at p95"
        )
    lines += notes(
        "planned: the simulation of the same arrivals, by coefficients of bursts between these",
        "runs. file: the error by the coefficients of runs/calibration.json; the bursts took",
        f"{report.drift:+.0%} longer than these predict. drawn: the simulation of arrivals that",
        "the planner draws itself. By the file, the engine saturates at",
        f"{report.saturation_per_second:.1f} checks/s.",
    )
    return "\n".join([*lines, caption(report)])


def caption(report: PlanValidation) -> str:
    """Where the numbers come from, in one line."""
    least, most = report.rules
    return (
        f"{METHODS[report.method].label}, {report.repeats} runs of {report.checks} conversations "
        f"at each rate, {LENGTHS[0]} to {LENGTHS[-1]} tokens, {least} to {most} rules each; "
        f"{source(report)}; random adapters."
    )


def draw(report: PlanValidation, path: Path) -> None:
    """Write the plot: measured and planned percentiles against the offered rate."""
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    rates = [row.offered_per_second for row in report.rows]
    for percent, colour in (("p50", BLUE), ("p95", VERMILION)):
        measured = [getattr(row, f"measured_{percent}_ms") for row in report.rows]
        planned = [getattr(row, f"replayed_{percent}_ms") for row in report.rows]
        axes.plot(rates, measured, "o-", color=colour, label=f"{percent}, measured")
        axes.plot(rates, planned, "x--", color=colour, label=f"{percent}, planned")
    axes.set_yscale("log")
    axes.set_xlabel("offered load: conversations per second")
    axes.set_ylabel("ms from arrival to the last verdict")
    axes.grid(linewidth=0.4, alpha=0.6, which="both")
    axes.legend()
    save_figure(figure, caption(report), path)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_count(parser, "--checks", CHECKS, "conversations at each rate")
    add_count(parser, "--repeats", REPEATS, "runs at each rate")
    parser.add_argument("--method", help="default: the first that shares conversations")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and the plot, print the table."""
    recipe = load_recipe(arguments.model)
    calibration = load_calibration(arguments.runs / "calibration.json")
    method = arguments.method or recipe.sharing_method
    report = run(recipe, calibration, method, arguments.checks, arguments.repeats)
    publish(report, arguments.runs / "plan_bench.json", table, draw)
