"""Ablation: one optimisation of the engine off at a time, under three kinds of traffic.

    fan-out   one conversation with many rules, and a slot for every adapter
    waves     the same with a slot for every third adapter
    fleet     conversations with one rule each, by Zipf's law of many, with few slots and little
              host memory

Every engine is a process of its own; the engines take turns, with the same conversations and
adapters, and must give the same verdicts. Knows nothing of what the verdicts mean.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from guard.errors import GuardError
from guard.layout import fingerprint
from guard.prompt import PromptBuilder
from guard.provenance import gpus
from guard.recipe import Recipe, load_recipe
from serve.bench.ablation.ablations import ABLATIONS, Ablation, Traffic
from serve.bench.ablation.measure import AblationSample, measure
from serve.bench.ablation.report import AblationReport, AblationRow, TrafficRows, draw, table
from serve.bench.command import add_count
from serve.bench.random_adapter import save_random_adapters
from serve.bench.report import Spread, engine_settings, median_count, origin, percentile, publish

ROUNDS = 3
# By how much the logit of a verdict may differ from the full engine's, in nats
SAME_NATS = {"float32": 1e-2}
SAME_NATS_NARROW = 0.5  # in a narrower type


@dataclass
class Contender:
    """An engine under one traffic, and its runs so far, in the order of their conversations."""

    traffic: Traffic
    ablation: Ablation
    recipe: Recipe  # of its adapters
    samples: dict[int, list[AblationSample]] = field(default_factory=dict)  # by round

    @property
    def adapter_kind(self) -> str:
        """A name for what its adapters read and have.

        Equal for engines that must give the same verdicts.
        """
        settings = self.recipe.settings(self.recipe.sharing_method)
        return fingerprint(self.recipe.rule_turn, settings.model_dump())

    def work(
        self, folders: Mapping[str, Mapping[str, Path]], number: int
    ) -> tuple[Recipe, Traffic, Ablation, Mapping[str, Path], int]:
        """What `measure` needs for its runs in round `number`."""
        return self.recipe, self.traffic, self.ablation, folders[self.adapter_kind], number

    @property
    def all_samples(self) -> list[AblationSample]:
        """Those of all rounds."""
        samples: list[AblationSample] = []
        for number in sorted(self.samples):
            samples += self.samples[number]
        return samples


def run(
    recipe: Recipe,
    ablations: Mapping[Traffic, Sequence[Ablation]] = ABLATIONS,
    *,
    rounds: int = ROUNDS,
    shares_process: bool = False,
) -> AblationReport:
    """Measure every ablation that means something here, round after round.

    With `shares_process`, engines that lack no seam run in this process, one after the other: they
    start sooner, and the peaks of their memory are not their own. Raises GuardError if two engines
    give different verdicts.
    """
    contenders = _contenders(recipe, ablations)
    with (
        tempfile.TemporaryDirectory() as scratch,
        tqdm(total=rounds * len(contenders), desc="measuring", unit="engine") as bar,
    ):
        folders = _adapters(Path(scratch), contenders)
        for number in range(rounds):
            order = (contenders[::-1], contenders)[number % 2]
            for contender in order:
                name = f"{contender.traffic.name}: {contender.ablation.name}"
                bar.set_postfix_str(name, refresh=False)
                if shares_process and not contender.ablation.seams_off:
                    measured = measure(*contender.work(folders, number))
                else:
                    measured = _in_own_process(contender, folders, number)
                contender.samples[number] = measured
                bar.update()
            # After every round, so that a wrong engine is found before the hour is over.
            traffics = _traffic_rows(contenders, ablations, rounds)
    report = AblationReport(
        **origin(recipe), engine=engine_settings(recipe), traffics=tuple(traffics)
    )
    peak_mib = max(row.peak_memory_mib for row in report.rows)
    return report.model_copy(update={"peak_memory_mib": peak_mib})


def _contenders(recipe: Recipe, ablations: Mapping[Traffic, Sequence[Ablation]]) -> list[Contender]:
    """The engines that mean something on this machine."""
    has_gpu = bool(gpus())
    contenders = []
    for traffic, of_traffic in ablations.items():
        for ablation in of_traffic:
            if not (ablation.is_cpu_only and has_gpu):
                contenders.append(Contender(traffic, ablation, ablation.recipe(recipe)))
    return contenders


def _adapters(root: Path, contenders: Sequence[Contender]) -> dict[str, dict[str, Path]]:
    """Random adapters of every kind: kind -> name -> folder."""
    count = max(contender.traffic.adapters for contender in contenders)
    folders: dict[str, dict[str, Path]] = {}
    for contender in contenders:
        kind, recipe = contender.adapter_kind, contender.recipe
        if kind not in folders:
            names = [f"adapter-{number}" for number in range(count)]
            folders[kind] = {name: root / kind / name for name in names}
            method, prompts = recipe.sharing_method, PromptBuilder.of(recipe)
            save_random_adapters(folders[kind].values(), recipe, method, prompts)
    return folders


def _in_own_process(
    contender: Contender, folders: Mapping[str, Mapping[str, Path]], number: int
) -> list[AblationSample]:
    """One engine's runs in a round: it switches off what the process cannot switch on again."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(measure, *contender.work(folders, number)).result()


def _traffic_rows(
    contenders: Sequence[Contender],
    ablations: Mapping[Traffic, Sequence[Ablation]],
    rounds: int,
) -> list[TrafficRows]:
    """The rows of every traffic.

    Raises GuardError if an engine gives other verdicts than the full one.
    """
    traffics = []
    for traffic in ablations:
        engines = [contender for contender in contenders if contender.traffic == traffic]
        rows = tuple(_row(contender, full_engine=engines[0]) for contender in engines)
        runs = rounds * traffic.runs
        traffics.append(
            TrafficRows(traffic=traffic.name, description=str(traffic), runs=runs, rows=rows)
        )
    return traffics


def _row(contender: Contender, full_engine: Contender) -> AblationRow:
    samples = contender.all_samples
    difference_nats = None
    if contender.adapter_kind == full_engine.adapter_kind:
        difference_nats = difference(contender, full_engine)
    latencies_ms: list[float] = []
    for sample in samples:
        latencies_ms += sample.latencies_ms
    return AblationRow(
        ablation=contender.ablation.name,
        wall_ms=Spread.of([sample.wall_ms for sample in samples]),
        engine_ms=statistics.median(sample.engine_ms for sample in samples),
        p95_ms=percentile(latencies_ms, 95),
        computed_tokens=median_count([sample.computed_tokens for sample in samples]),
        lower_bound_ms=statistics.median(sample.lower_bound_ms for sample in samples),
        adapter_loads=median_count([sample.adapter_loads for sample in samples]),
        swap_ins=median_count([sample.swap_ins for sample in samples]),
        difference_nats=difference_nats,
        peak_memory_mib=max(sample.peak_memory_mib for sample in samples),
    )


def difference(contender: Contender, full_engine: Contender) -> float:
    """The largest difference of a verdict's logit, in nats.

    Raises GuardError if it is more than the order of sums can explain.
    """
    largest = 0.0
    for sample, full in zip(contender.all_samples, full_engine.all_samples, strict=True):
        for logit, full_logit in zip(sample.logits, full.logits, strict=True):
            largest = max(largest, abs(logit - full_logit))
    if largest > SAME_NATS.get(contender.recipe.dtype, SAME_NATS_NARROW):
        where = f"{contender.traffic.name}, {contender.ablation.name}"
        remedy = "Run the tests of serve/: an optimisation changes the verdicts"
        got = f"{largest:.3g} nats"
        raise GuardError("two engines disagree", where=where, got=got, remedy=remedy)
    return largest


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    traffics = [traffic.name for traffic in ABLATIONS]
    parser.add_argument("--traffic", choices=traffics, help="default: all of them")
    add_count(parser, "--rounds", ROUNDS, "engines of each kind")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and the plot, print the table."""
    ablations = {
        traffic: of_traffic
        for traffic, of_traffic in ABLATIONS.items()
        if arguments.traffic in (None, traffic.name)
    }
    report = run(load_recipe(arguments.model), ablations, rounds=arguments.rounds)
    publish(report, arguments.runs / "ablation_bench.json", draw, table)
