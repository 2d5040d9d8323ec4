"""The host's cost: what a rule costs beside the model.

The base has one narrow layer and random aLoRAs, so that nearly all of a check's time is Python's:
ours and vLLM's. Conversations of random words, which are not in the cache, are put to 1 to 500
rules. They are measured as they are, and again with clocks around the functions of each cause; the
clocks themselves add some microseconds a rule. On a GPU this time comes beside the model's, and
decides.
"""

from __future__ import annotations

import argparse
import itertools
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence

from tqdm import tqdm

from guard.files.yaml_file import Strict
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count
from serve.bench.host.stopwatch import Stopwatch
from serve.bench.narrow import narrow_base
from serve.bench.report import BenchReport, Spread, origin, publish
from serve.bench.scores import judged
from serve.bench.workload.prompts import conversation
from serve.bench.workload.random_adapter import by_name, random_adapters
from serve.engine import GuardEngine

RULES = (1, 20, 100, 500)
LENGTHS = (200, 1000)  # tokens of a conversation
REPEATS = 15
WARM_UP_RUNS = 3

# On runner V1, which a CPU has. The time of a nested function counts for that function only.
MODEL = "model"
CAUSES: Mapping[str, tuple[str, ...]] = {
    "our engine": (
        "serve.engine.engine:GuardEngine.check",
        "serve.engine.dispatch:Dispatcher.step",
    ),
    "tokenising": ("serve.engine.prompts:CallPrompts.prompt",),
    "request set-up": (
        "serve.engine.backends.decoder:DecoderBackend.submit",
        "vllm.v1.engine.core:EngineCore.preprocess_add_request",
    ),
    "hashing and look-up": (
        "vllm.v1.request:Request.update_block_hashes",
        "vllm.v1.core.kv_cache_coordinator:UnitaryKVCacheCoordinator.find_longest_cache_hit",
    ),
    "scheduling": (
        "vllm.v1.engine.core:EngineCore.add_request",
        "vllm.v1.core.sched.scheduler:Scheduler.schedule",
    ),
    "blocks": (
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.free",
    ),
    "mapping": ("vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.set_active_loras",),
    "metadata": (
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
    ),
    MODEL: ("vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward",),
    "sampling": ("vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",),
    "output": (
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        "serve.engine.backends.decoder:DecoderBackend._output",
    ),
    "the rest of a step": ("serve.engine.backends.decoder:DecoderBackend.step",),
}


class HostCell(Strict):
    """Checks of `rules` rules on conversations of `tokens` tokens."""

    tokens: int
    rules: int
    wall_ms: Spread  # without clocks
    split_ms: dict[str, float]  # with clocks: the mean by cause

    @property
    def host_ms(self) -> float:
        """The host's time of a check: its wall time without the model's share of it."""
        clocked = sum(self.split_ms.values())
        return self.wall_ms.median * (1 - self.split_ms[MODEL] / clocked)


class HostReport(BenchReport):
    """Everything in `runs/host_bench.json`."""

    repeats: int
    cells: list[HostCell]

    def marginal_ms(self, tokens: int, fewest: int, most: int) -> float | None:
        """The host's time for a further rule, between two numbers of rules.

        None if one of them is missing.
        """
        cells = {cell.rules: cell for cell in self.cells if cell.tokens == tokens}
        if fewest not in cells or most not in cells:
            return None
        return (cells[most].host_ms - cells[fewest].host_ms) / (most - fewest)


def run(
    recipe: Recipe,
    *,
    lengths: Sequence[int] = LENGTHS,
    rules: Sequence[int] = RULES,
    repeats: int = REPEATS,
) -> HostReport:
    """Measure every length with every number of rules, in one engine."""
    with narrow_base(recipe) as narrow:
        method = narrow.sharing_method
        with random_adapters(narrow, [method], max(rules)) as folders:
            adapters = by_name(folders)
            with GuardEngine(narrow, adapters, max_loras=len(adapters)) as engine:
                cells = [(tokens, count) for tokens in lengths for count in rules]
                measured = _measure(engine, PromptBuilder.of(narrow), cells, repeats)
    return HostReport(**origin(recipe), repeats=repeats, cells=measured)


def _measure(
    engine: GuardEngine, prompts: PromptBuilder, cells: Sequence[tuple[int, int]], repeats: int
) -> list[HostCell]:
    """Measure the walls of all cells, then the splits: clocks that come and go would undo what
    Python has specialised.

    Every repeat measures all cells, so that a slower minute of the machine affects each of them. Of
    two checks of a cell the second counts, because vLLM clears a check's requests away in the next
    one.
    """
    seeds = itertools.count()
    walls = _measure_walls(engine, prompts, cells, repeats, seeds)
    splits = _measure_splits(engine, prompts, cells, repeats, seeds)
    return [
        HostCell(
            tokens=cell[0],
            rules=cell[1],
            wall_ms=Spread.of(walls[cell]),
            split_ms=_mean_ms(splits[cell]),
        )
        for cell in cells
    ]


def _measure_walls(
    engine: GuardEngine,
    prompts: PromptBuilder,
    cells: Sequence[tuple[int, int]],
    repeats: int,
    seeds: Iterator[int],
) -> dict[tuple[int, int], list[float]]:
    """The milliseconds of each cell's checks, without clocks."""
    walls: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    for repeat in tqdm(range(-WARM_UP_RUNS, repeats), desc="host", unit="repeat"):
        for cell in cells:
            _check_ms(engine, prompts, cell, next(seeds))
            wall_ms = _check_ms(engine, prompts, cell, next(seeds))
            if repeat >= 0:
                walls[cell].append(wall_ms)
    return walls


def _measure_splits(
    engine: GuardEngine,
    prompts: PromptBuilder,
    cells: Sequence[tuple[int, int]],
    repeats: int,
    seeds: Iterator[int],
) -> dict[tuple[int, int], list[dict[str, float]]]:
    """The seconds of each cell's checks by cause, with clocks."""
    splits: dict[tuple[int, int], list[dict[str, float]]] = {cell: [] for cell in cells}
    stopwatch = Stopwatch()
    with stopwatch.watching(CAUSES):
        for repeat in tqdm(range(-WARM_UP_RUNS, repeats), desc="host, clocked", unit="repeat"):
            for cell in cells:
                _check_ms(engine, prompts, cell, next(seeds))
                stopwatch.seconds.clear()
                _check_ms(engine, prompts, cell, next(seeds))
                if repeat >= 0:
                    splits[cell].append(dict(stopwatch.seconds))
    return splits


def _check_ms(
    engine: GuardEngine, prompts: PromptBuilder, cell: tuple[int, int], seed: int
) -> float:
    """The wall time of one check of a conversation that is not in the cache.

    Raises GuardError if a rule was not judged.
    """
    tokens, rules = cell
    messages = conversation(prompts, tokens, seed)
    names = list(engine.rules)[:rules]
    engine.forget()
    started = time.perf_counter()
    check = engine.check(messages, names)
    wall_ms = (time.perf_counter() - started) * 1000
    judged(check, where=f"{tokens} tokens, {rules} rules")
    return wall_ms


def _mean_ms(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    means = {}
    for cause in CAUSES:
        seconds = [sample.get(cause, 0.0) for sample in samples]
        means[cause] = 1000 * sum(seconds) / len(seconds)
    return means


def table(report: HostReport) -> str:
    """The report as text."""
    head = "".join(f"{cause:>20}" for cause in CAUSES)
    lines = [
        f"a base of one narrow layer, medians of {report.repeats} checks; "
        "microseconds a rule by cause, means with clocks:",
        f"{'tokens':>8}{'rules':>7}{'check ms':>10}{'host us/rule':>14}{head}",
    ]
    for cell in report.cells:
        split = ""
        for cause in CAUSES:
            split += f"{1000 * cell.split_ms[cause] / cell.rules:>20.1f}"
        per_rule = 1000 * cell.host_ms / cell.rules
        lines.append(
            f"{cell.tokens:>8}{cell.rules:>7}{cell.wall_ms.median:>10.1f}{per_rule:>14.0f}{split}"
        )
    for tokens in dict.fromkeys(cell.tokens for cell in report.cells):
        marginal_ms = report.marginal_ms(tokens, 20, 500)
        if marginal_ms is not None:
            lines.append(
                f"{tokens} tokens, a further rule from 20 to 500: {marginal_ms:.3f} ms on the host"
            )
    note = "host: the check's wall time without the model's share, the conversation's part included"
    return "\n".join([*lines, *textwrap.wrap(note, 100)])


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_count(parser, "--repeats", REPEATS, "checks of each length and number of rules")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and print the table."""
    report = run(load_recipe(arguments.model), repeats=arguments.repeats)
    publish(report, arguments.runs / "host_bench.json", table)
