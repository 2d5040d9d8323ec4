"""Starts a base with its rules, and measures the cells of a grid on such engines.

Knows nothing of tables, plots or kept reports.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.layout import Runs
from guard.method import METHODS
from guard.prompt.builders import prompt_builder
from guard.recipe import Recipe
from serve.bench.encoder.report import EncoderCell, Weights
from serve.bench.memory import memory_beside
from serve.bench.report import Spread
from serve.bench.scores import judged
from serve.bench.workload.adapter_folders import copies
from serve.bench.workload.prompts import conversation
from serve.bench.workload.random_adapter import random_adapters
from serve.engine import GuardEngine
from serve.engine.adapter import trained

# Tokens of conversations that a check reads, by their nominal length: half a minute on one core
LARGEST_CELL = 50_000


@dataclass(frozen=True)
class EncoderGrid:
    """What is measured: numbers of rules, lengths of conversations, and the number of repeats."""

    rules: tuple[int, ...]
    tokens: tuple[int, ...]
    repeats: int


@dataclass(frozen=True)
class MethodOnBase:
    """One method on one base: the engine that runs it, and the names of its rules there."""

    model: str
    method: str
    weights: Weights
    engine: GuardEngine
    names: Sequence[str]

    def reads(self, tokens: int, rules: int) -> int:
        """The number of tokens that a check reads, by the nominal length of the conversation.

        Suffixes and what the windows of an encoder have in common come on top.
        """
        if METHODS[self.method].shares_conversation:
            return tokens
        return tokens * rules


@contextlib.contextmanager
def methods_on(
    recipe: Recipe, runs: Runs, rules: int, engines: int
) -> Iterator[list[MethodOnBase]]:
    """The methods of a recipe in one engine, which is one of `engines` on this machine."""
    methods = list(recipe.methods)
    if not recipe.is_encoder:
        methods = recipe.adapter_methods  # heads would change the dtype of the base
    with contextlib.ExitStack() as stack:
        folders: dict[str, list[Path]] = {}
        weights: dict[str, Weights] = dict.fromkeys(methods, "trained")
        for method in methods:
            try:
                folders[method] = list(trained(runs, recipe.name, method).values())
            except GuardError:
                made = stack.enter_context(random_adapters(recipe, [method], 1))
                folders[method] = list(made[method].values())
                weights[method] = "random weights"
                print(f"{recipe.name} {method}: random weights, no rule is trained", flush=True)
        names, copied = copies(folders, rules)
        print(f"loading {recipe.name} with {len(copied)} rules", flush=True)
        memory = memory_beside(engines)
        engine = GuardEngine(recipe, copied, max_loras=slots(recipe, rules), **memory)
        stack.enter_context(engine)
        contestants: list[MethodOnBase] = []
        for method in methods:
            contestant = MethodOnBase(recipe.name, method, weights[method], engine, names[method])
            contestants.append(contestant)
        yield contestants


def slots(recipe: Recipe, rules: int) -> int:
    """The number of slots: one for each rule's adapter of each method; heads need none."""
    return max(1, rules * len(recipe.adapter_methods))


@dataclass(frozen=True)
class EncoderSample:
    """One check of a cell."""

    wall_ms: float
    computed_tokens: int
    forward_passes: int
    swap_ins: int


@dataclass(frozen=True)
class PlannedCell:
    """A cell that is to be measured."""

    contestant: MethodOnBase
    tokens: int
    rules: int


def measure(
    recipe: Recipe, contestants: Sequence[MethodOnBase], grid: EncoderGrid
) -> list[EncoderCell]:
    """Measure the cells of the grid that read at most LARGEST_CELL tokens by their nominal length.

    Every repeat has another order. Lengths of conversations are in the recipe's tokens.
    """
    prompts = prompt_builder(recipe)
    planned: list[PlannedCell] = []
    for contestant, size, count in itertools.product(contestants, grid.tokens, grid.rules):
        if contestant.reads(size, count) <= LARGEST_CELL:
            planned.append(PlannedCell(contestant, size, count))
    for cell in planned:
        if cell.tokens == min(grid.tokens):  # the shortest ones warm up what the longer ones use
            _check(cell, conversation(prompts, cell.tokens, seed=0))
    samples: list[list[EncoderSample]] = [[] for _ in planned]
    for repeat in range(grid.repeats):
        order = random.Random(repeat).sample(range(len(planned)), len(planned))
        for index in order:
            cell = planned[index]
            messages = conversation(prompts, cell.tokens, seed=repeat + 1)
            samples[index].append(_check(cell, messages))
    cells: list[EncoderCell] = []
    for cell, cell_samples in zip(planned, samples, strict=True):
        measured = EncoderCell(
            model=cell.contestant.model,
            method=cell.contestant.method,
            tokens=cell.tokens,
            rules=cell.rules,
            wall_ms=Spread.of([sample.wall_ms for sample in cell_samples]),
            computed_tokens=cell_samples[-1].computed_tokens,
            forward_passes=cell_samples[-1].forward_passes,
            swap_ins=max(sample.swap_ins for sample in cell_samples),
        )
        cells.append(measured)
    return cells


def _check(cell: PlannedCell, messages: tuple[Message, ...]) -> EncoderSample:
    """Measure one check of a cell. Raises GuardError if a rule was not judged."""
    engine, names = cell.contestant.engine, cell.contestant.names[: cell.rules]
    engine.forget()
    before = engine.counters
    started = time.perf_counter()
    check = engine.check(messages, names)
    wall_ms = (time.perf_counter() - started) * 1000
    judged(check, where=f"{cell.contestant.method} on {cell.contestant.model}")
    return EncoderSample(
        wall_ms=wall_ms,
        computed_tokens=check.computed_tokens,
        forward_passes=engine.counters.forward_passes - before.forward_passes,
        swap_ins=engine.counters.swap_ins - before.swap_ins,
    )
