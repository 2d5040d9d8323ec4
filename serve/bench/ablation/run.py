"""Ablation: one optimisation of the engine is off at a time, under three kinds of traffic.

    fan-out   one conversation with many rules, and a slot for every adapter
    waves     the same with a slot for every third adapter
    fleet     conversations with one rule each, drawn from many by Zipf's law, with few slots and
              little host memory

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
from guard.machine.provenance import gpus
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from serve.bench.ablation.ablations import ABLATIONS, Ablation, Traffic
from serve.bench.ablation.measure import AblationSample, measure
from serve.bench.ablation.report import AblationReport, AblationRow, TrafficRows, draw, table
from serve.bench.command import add_count
from serve.bench.report import Spread, engine_settings, median_count, origin, percentile, publish
from serve.bench.workload.random_adapter import save_random_adapters

ROUNDS = 3
# How much the logit of a verdict may differ from the full engine's, in nats, by dtype.
SAME_NATS = {"float32": 1e-2}
SAME_NATS_NARROW = 0.5  # in a narrower dtype
IMPORTED_ONCE = [
    "serve.bench.ablation.measure",
    "serve.engine.backends.decoder",
    "torch._inductor.compile_fx",
]


@dataclass
class AblatedEngine:
    """An engine under one traffic, and its runs so far, in the order of their conversations."""

    traffic: Traffic
    ablation: Ablation
    recipe: Recipe  # the recipe of its adapters
    samples: dict[int, list[AblationSample]] = field(default_factory=dict)  # by round

    @property
    def adapter_kind(self) -> str:
        """A name for what its adapters read and which layers they change. It is equal for engines
        that must give the same verdicts.
        """
        settings = self.recipe.settings(self.recipe.sharing_method)
        return fingerprint(self.recipe.rule_turn, settings.model_dump())

    def work(
        self, folders: Mapping[str, Mapping[str, Path]], number: int
    ) -> tuple[Recipe, Traffic, Ablation, Mapping[str, Path], int]:
        """The arguments of `measure` for its runs in round `number`."""
        return self.recipe, self.traffic, self.ablation, folders[self.adapter_kind], number

    @property
    def all_samples(self) -> list[AblationSample]:
        """The samples of all rounds."""
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
    """Measure every ablation that applies to this recipe, round after round.

    With `shares_process`, engines that lack no seam run in this process, one after the other. They
    start sooner, but share one peak of memory. Raises GuardError if two engines give different
    verdicts.
    """
    ablated_engines = _ablated_engines(recipe, ablations)
    with (
        tempfile.TemporaryDirectory() as scratch,
        tqdm(total=rounds * len(ablated_engines), desc="measuring", unit="engine") as bar,
    ):
        folders = _adapters(Path(scratch), ablated_engines)
        for number in range(rounds):
            order = (ablated_engines[::-1], ablated_engines)[number % 2]
            for ablated in order:
                name = f"{ablated.traffic.name}: {ablated.ablation.name}"
                bar.set_postfix_str(name, refresh=False)
                if shares_process and not ablated.ablation.seams_off:
                    measured = measure(*ablated.work(folders, number))
                else:
                    measured = _in_own_process(ablated, folders, number)
                ablated.samples[number] = measured
                bar.update()
            # After every round, so that a wrong engine is found early.
            traffics = _traffic_rows(ablated_engines, ablations, rounds)
    report = AblationReport(
        **origin(recipe), engine=engine_settings(recipe), traffics=tuple(traffics)
    )
    peak_mib = max(row.peak_memory_mib for row in report.rows)
    return report.model_copy(update={"peak_memory_mib": peak_mib})


def _ablated_engines(
    recipe: Recipe, ablations: Mapping[Traffic, Sequence[Ablation]]
) -> list[AblatedEngine]:
    """The engines whose optimisation exists on this machine."""
    has_gpu = bool(gpus())
    ablated_engines = []
    for traffic, traffic_ablations in ablations.items():
        for ablation in traffic_ablations:
            if not (ablation.is_cpu_only and has_gpu):
                ablated_engines.append(AblatedEngine(traffic, ablation, ablation.recipe(recipe)))
    return ablated_engines


def _adapters(root: Path, ablated_engines: Sequence[AblatedEngine]) -> dict[str, dict[str, Path]]:
    """Make random adapters of every kind: kind -> name -> folder."""
    count = max(ablated.traffic.adapters for ablated in ablated_engines)
    folders: dict[str, dict[str, Path]] = {}
    for ablated in ablated_engines:
        kind, recipe = ablated.adapter_kind, ablated.recipe
        if kind not in folders:
            names = [f"adapter-{number}" for number in range(count)]
            folders[kind] = {name: root / kind / name for name in names}
            method, prompts = recipe.sharing_method, PromptBuilder.of(recipe)
            save_random_adapters(folders[kind].values(), recipe, method, prompts)
    return folders


def _in_own_process(
    ablated: AblatedEngine, folders: Mapping[str, Mapping[str, Path]], number: int
) -> list[AblationSample]:
    """Measure one engine's runs in a round in a process of its own, because a process cannot switch
    on again what is switched off.

    The process is forked from one that has imported what all of them need and done nothing else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(measure, *ablated.work(folders, number)).result()


def _traffic_rows(
    ablated_engines: Sequence[AblatedEngine],
    ablations: Mapping[Traffic, Sequence[Ablation]],
    rounds: int,
) -> list[TrafficRows]:
    """The rows of every traffic.

    Raises GuardError if an engine gives other verdicts than the full one.
    """
    traffics = []
    for traffic in ablations:
        engines = [ablated for ablated in ablated_engines if ablated.traffic == traffic]
        rows = tuple(_row(ablated, full_engine=engines[0]) for ablated in engines)
        runs = rounds * traffic.runs
        traffics.append(
            TrafficRows(traffic=traffic.name, description=str(traffic), runs=runs, rows=rows)
        )
    return traffics


def _row(ablated: AblatedEngine, full_engine: AblatedEngine) -> AblationRow:
    samples = ablated.all_samples
    difference_nats = None
    if ablated.adapter_kind == full_engine.adapter_kind:
        difference_nats = difference(ablated, full_engine)
    latencies_ms: list[float] = []
    for sample in samples:
        latencies_ms += sample.latencies_ms
    return AblationRow(
        ablation=ablated.ablation.name,
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


def difference(ablated: AblatedEngine, full_engine: AblatedEngine) -> float:
    """The largest difference of a verdict's logit, in nats.

    Raises GuardError if it is more than the order of sums can explain.
    """
    largest = 0.0
    for sample, full in zip(ablated.all_samples, full_engine.all_samples, strict=True):
        for logit, full_logit in zip(sample.logits, full.logits, strict=True):
            largest = max(largest, abs(logit - full_logit))
    if largest > SAME_NATS.get(ablated.recipe.serving_dtype, SAME_NATS_NARROW):
        where = f"{ablated.traffic.name}, {ablated.ablation.name}"
        remedy = "Run the tests of serve/: an optimisation changes the verdicts"
        got = f"{largest:.3g} nats"
        raise GuardError("two engines disagree", where=where, got=got, remedy=remedy)
    return largest


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    traffics = [traffic.name for traffic in ABLATIONS]
    parser.add_argument("--traffic", choices=traffics, help="default: all of them")
    add_count(parser, "--rounds", ROUNDS, "rounds, in each of which every engine is started once")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and the plot, print the table."""
    ablations = {
        traffic: traffic_ablations
        for traffic, traffic_ablations in ABLATIONS.items()
        if arguments.traffic in (None, traffic.name)
    }
    report = run(load_recipe(arguments.model), ablations, rounds=arguments.rounds)
    publish(report, arguments.runs / "ablation_bench.json", table, draw)
