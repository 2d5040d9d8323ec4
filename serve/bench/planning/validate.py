"""The planner held to a measured load: five rates that its coefficients were not fitted to.

Open-loop load as `make bench NAME=load` puts it to an engine: Poisson arrivals, lengths as in SGD's
dialogues, 5 to 20 rules each. Beside it the planner's simulation of the same arrivals, and of
arrivals that it draws itself from the same distributions. Reads `runs/calibration.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from guard.errors import GuardError
from guard.files.yaml_file import Strict
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count
from serve.bench.load import LENGTHS, RULES, Arrival, LoadDriver
from serve.bench.plot import BLUE, VERMILION, new_figure, save_figure
from serve.bench.report import BenchReport, notes, origin, percentile, publish, source
from serve.bench.workload.random_adapter import by_name, random_adapters
from serve.engine import GuardEngine
from serve.plan.device.calibration import COMMAND, Calibration, load_calibration
from serve.plan.replay.replica import Replay, ReplicaSimulation, ReplicaSizes
from serve.plan.replay.scheduler import StepLimits
from serve.plan.traffic.arrival import CheckArrival
from serve.plan.traffic.generate import TrafficShape, draw_traffic

SHARES = (0.2, 0.4, 0.6, 0.75, 0.9)  # of the rate at which the planner says that it saturates
CHECKS, REPEATS = 250, 2
DRAWN = 4000  # checks that the planner draws itself
WARM_UP_CHECKS = 30
FIRST_SEED = 501
AIM_P50, AIM_P95 = 0.20, 0.30


class RateRow(Strict):
    """One rate: latencies in ms as measured, as simulated from the same arrivals, and from others
    of the same distributions.
    """

    offered_per_second: float
    measured_p50_ms: float
    measured_p95_ms: float
    replayed_p50_ms: float
    replayed_p95_ms: float
    drawn_p50_ms: float
    drawn_p95_ms: float

    @property
    def p50_error(self) -> float:
        """Of the simulation of the same arrivals, relative to what was measured."""
        return self.replayed_p50_ms / self.measured_p50_ms - 1

    @property
    def p95_error(self) -> float:
        """As `p50_error`."""
        return self.replayed_p95_ms / self.measured_p95_ms - 1

    @property
    def is_within_aim(self) -> bool:
        """Whether both percentiles are as near as was aimed at."""
        return abs(self.p50_error) <= AIM_P50 and abs(self.p95_error) <= AIM_P95


class PlanValidation(BenchReport):
    """Everything in `runs/plan_bench.json`; `calibration_commit` is that of the coefficients."""

    method: str
    checks: int
    repeats: int
    rules: tuple[int, int]
    saturation_per_second: float
    calibration_commit: str
    calibration_hardware: str
    rows: tuple[RateRow, ...]


class PlannedReplica:
    """The planner's replica, with the calibration's coefficients of one method."""

    def __init__(self, calibration: Calibration, method: str) -> None:
        sizes, most = calibration.engine, RULES[1]
        limits = StepLimits(sizes.step_tokens, sizes.max_sequences, most, sizes.block_size)
        self._sizes = ReplicaSizes(limits, sizes.cache_tokens, most, most, sizes.scaffold_tokens)
        self._cost, self._suffix = calibration.cost(method), sizes.suffix_tokens
        self._shares = METHODS[method].shares_conversation
        self._shape = TrafficShape(LENGTHS, RULES, most)

    def replay(self, arrivals: Sequence[CheckArrival]) -> Replay:
        """The arrivals, from an empty cache."""
        simulation = ReplicaSimulation(self._sizes, self._cost, self._suffix, shares=self._shares)
        return simulation.run(arrivals)

    def drawn(self, rate: float) -> Replay:
        """Arrivals that the planner draws."""
        return self.replay(draw_traffic(self._shape, rate, DRAWN, seed=0).arrivals)

    @property
    def saturation_per_second(self) -> float:
        """Checks per second of a queue that is never empty."""
        return self.drawn(1e6).per_second


def as_planned(prompts: PromptBuilder, traffic: Sequence[Arrival]) -> list[CheckArrival]:
    """The load's conversations as the planner reads them: tokens and times, no words."""
    planned = []
    for number, arrival in enumerate(traffic):
        tokens = len(prompts.prefix_ids(arrival.messages))
        planned.append(CheckArrival(arrival.due_s, number, tokens, arrival.rules))
    return planned


def run(
    recipe: Recipe,
    calibration: Calibration,
    method: str,
    checks: int = CHECKS,
    repeats: int = REPEATS,
) -> PlanValidation:
    """Measure every rate, in `repeats` rounds over all of them, and simulate each."""
    if calibration.model != recipe.name:
        problem = "the calibration is of another model"
        raise GuardError(problem, got=calibration.model, remedy=f"Run `{COMMAND} MODEL=…`")
    planned, prompts = PlannedReplica(calibration, method), PromptBuilder.of(recipe)
    saturation = planned.saturation_per_second
    measured: dict[float, list[float]] = {share: [] for share in SHARES}
    replayed: dict[float, list[float]] = {share: [] for share in SHARES}
    with (
        random_adapters(recipe, [method], RULES[1]) as folders,
        tqdm(total=len(SHARES) * repeats * checks, desc="measuring", unit="check") as bar,
        GuardEngine(recipe, by_name(folders), max_loras=RULES[1]) as engine,
    ):
        driver = LoadDriver(engine, recipe)
        driver.run(method, driver.traffic(saturation, WARM_UP_CHECKS, seed=0))
        for repeat in range(repeats):
            for number, share in enumerate(SHARES):
                seed = FIRST_SEED + repeat * len(SHARES) + number
                traffic = driver.traffic(share * saturation, checks, seed)
                measured[share] += driver.run(method, traffic).timed.latencies_s
                replayed[share] += list(planned.replay(as_planned(prompts, traffic)).latencies_s)
                bar.update(checks)
    rows = []
    for share in SHARES:
        rate = share * saturation
        rows.append(_row(rate, measured[share], replayed[share], planned.drawn(rate)))
    return PlanValidation(
        **origin(recipe),
        method=method,
        checks=checks,
        repeats=repeats,
        rules=RULES,
        saturation_per_second=saturation,
        calibration_commit=calibration.commit,
        calibration_hardware=calibration.hardware,
        rows=tuple(rows),
    )


def _row(
    rate: float, measured_s: Sequence[float], replayed_s: Sequence[float], drawn: Replay
) -> RateRow:
    return RateRow(
        offered_per_second=rate,
        measured_p50_ms=1000 * percentile(measured_s, 50),
        measured_p95_ms=1000 * percentile(measured_s, 95),
        replayed_p50_ms=1000 * percentile(replayed_s, 50),
        replayed_p95_ms=1000 * percentile(replayed_s, 95),
        drawn_p50_ms=drawn.percentile_ms(50),
        drawn_p95_ms=drawn.percentile_ms(95),
    )


def table(report: PlanValidation) -> str:
    """The report as text."""
    head = (
        f"{'offered/s':>9} | {'p50 ms':>7} {'planned':>7} {'off by':>7} {'drawn':>7} | "
        f"{'p95 ms':>7} {'planned':>7} {'off by':>7} {'drawn':>7}"
    )
    lines = [head, "-" * len(head)]
    for row in report.rows:
        lines.append(
            f"{row.offered_per_second:>9.1f} | {row.measured_p50_ms:>7.0f} "
            f"{row.replayed_p50_ms:>7.0f} {row.p50_error:>+7.0%} {row.drawn_p50_ms:>7.0f} | "
            f"{row.measured_p95_ms:>7.0f} {row.replayed_p95_ms:>7.0f} {row.p95_error:>+7.0%} "
            f"{row.drawn_p95_ms:>7.0f}"
        )
    within = sum(row.is_within_aim for row in report.rows)
    lines += notes(
        f"{within} of {len(report.rows)} rates within {AIM_P50:.0%} at p50 and {AIM_P95:.0%} at "
        "p95. planned: the simulation of the same arrivals; drawn: of the planner's own, from the",
        f"same distributions. By the planner it saturates at {report.saturation_per_second:.1f} "
        "checks/s.",
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
