"""How long N rules on an encoder take on one conversation, and beside them N aLoRAs on a decoder.

    lora    on the encoder: N adapters, each with its head: each reads the conversation
    head    on the encoder: N heads on the frozen base, which reads the conversation once
    alora   on the decoder of --beside: N adapters behind a conversation that is read once
    lora    on the decoder: N adapters, each of which reads the conversation

From some number of rules on, the conversation that is read once is the faster: the table says from
which. Both engines are in one process, and every check is put to one of them, in another order in
every repeat; nothing is cached from one to the next. Rules that are trained are loaded again and
again under other names, else adapters with random weights are timed; every adapter has a slot.
Cells that read more than LARGEST_CELL tokens are left out. Knows nothing of what the verdicts mean.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from guard.card import read_card
from guard.errors import GuardError
from guard.example import Message
from guard.files.yaml_file import Strict
from guard.layout import Runs, fingerprint
from guard.machine.provenance import hardware, versions
from guard.method import METHODS
from guard.prompt.builders import prompt_builder
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count, add_option
from serve.bench.memory import memory_beside
from serve.bench.plot import METHOD_COLOURS, METHOD_MARKERS, new_figure, plot_spreads, save_figure
from serve.bench.report import (
    BenchReport,
    Spread,
    engine_settings,
    origin,
    publish,
    source,
    threads,
)
from serve.bench.scores import judged
from serve.bench.workload.adapter_folders import copies
from serve.bench.workload.prompts import conversation
from serve.bench.workload.random_adapter import random_adapters
from serve.engine import CODE, GuardEngine
from serve.engine.adapter import trained

LARGEST_CELL = 50_000  # tokens read: half a minute a check on one core
REPEATS = 5
BESIDE = "tiny"
NOBODY = "none"
LINES = {True: "-", False: "--"}  # of the encoder, of the decoder beside it
REPORT = "encoder_bench.json"

Weights = Literal["trained", "random weights"]


@dataclass(frozen=True)
class EncoderGrid:
    """What is measured: numbers of rules, tokens of a conversation, and how often."""

    rules: tuple[int, ...]
    tokens: tuple[int, ...]
    repeats: int


FULL = EncoderGrid((1, 2, 5, 20, 100), (120, 450, 2000), REPEATS)  # the last in several windows
QUICK = EncoderGrid((1, 20, 100), (120, 450), 2)


class EncoderCell(Strict):
    """What `rules` rules of a model's method took on conversations of so many tokens.

    `tokens` are the encoder's; the decoder reads the same words.
    """

    model: str
    method: str
    tokens: int
    rules: int
    wall_ms: Spread
    computed_tokens: int  # in a repeat
    swap_ins: int  # while the clock ran, the most of any repeat: each adapter has a slot of its own


class EncoderReport(BenchReport):
    """Everything in `runs/encoder_bench.json`."""

    inputs: str  # fingerprint of what the numbers depend on
    threads: int  # of each engine
    engine: dict[str, str]
    beside: str  # the decoder's recipe, or NOBODY
    engine_beside: dict[str, str]  # the decoder's; empty without one
    adapters: dict[str, dict[str, Weights]]  # by model and method, heads among them
    repeats: int
    cells: tuple[EncoderCell, ...]

    def adapter_method(self, model: str) -> str:
        """Of the model's methods with adapters the one that shares conversations, if one does."""
        names = dict.fromkeys(cell.method for cell in self.cells if cell.model == model)
        adapters = [METHODS[name] for name in names if METHODS[name].is_adapter]
        return max(adapters, key=lambda method: method.shares_conversation).name

    def line(self, model: str, method: str, tokens: int) -> list[EncoderCell]:
        """The cells of a model's method at one length, by number of rules."""
        cells: list[EncoderCell] = []
        for cell in self.cells:
            if (cell.model, cell.method, cell.tokens) == (model, method, tokens):
                cells.append(cell)
        return sorted(cells, key=lambda cell: cell.rules)


@dataclass(frozen=True)
class MethodOnBase:
    """One method of an engine's model, and the names of its rules."""

    model: str
    method: str
    weights: Weights
    engine: GuardEngine
    names: Sequence[str]

    def reads(self, tokens: int, rules: int) -> int:
        """How many tokens a check reads, about."""
        if METHODS[self.method].shares_conversation:
            return tokens
        return tokens * rules


@dataclass(frozen=True)
class EncoderSample:
    """One check of a cell."""

    wall_ms: float
    computed_tokens: int
    swap_ins: int


@dataclass(frozen=True)
class PlannedCell:
    """What is measured together."""

    contestant: MethodOnBase
    tokens: int
    rules: int


def run(
    recipe: Recipe,
    runs: Runs,
    beside: Recipe | None = None,
    grid: EncoderGrid = FULL,
) -> EncoderReport:
    """Measure every cell of the grid. Raises GuardError for a decoder."""
    _check_encoder(recipe)
    recipes = _recipes(recipe, beside)
    rules = max(grid.rules)
    with contextlib.ExitStack() as stack:
        contestants: list[MethodOnBase] = []
        for one_of_both in recipes:
            of_recipe = _contestants(one_of_both, runs, rules, len(recipes))
            contestants += stack.enter_context(of_recipe)
        cells = _measured(recipe, contestants, grid)
    adapters: dict[str, dict[str, Weights]] = {one_of_both.name: {} for one_of_both in recipes}
    for contestant in contestants:
        adapters[contestant.model][contestant.method] = contestant.weights
    return EncoderReport(
        **origin(recipe),
        inputs=_inputs(recipe, runs, beside, grid),
        threads=threads(),
        engine=_settings(recipe, rules),
        beside=beside.name if beside else NOBODY,
        engine_beside=_settings(beside, rules) if beside else {},
        adapters=adapters,
        repeats=grid.repeats,
        cells=tuple(cells),
    )


def _check_encoder(recipe: Recipe) -> None:
    if not recipe.is_encoder:
        remedy = "Name an encoder, as MODEL=minilm; for this one, `make serve`"
        raise GuardError("not an encoder", where=f"recipe {recipe.name}", remedy=remedy)


def _recipes(recipe: Recipe, beside: Recipe | None) -> list[Recipe]:
    if beside is None:
        return [recipe]
    return [recipe, beside]


def _slots(recipe: Recipe, rules: int) -> int:
    """One for each adapter that so many rules have by each method; heads need none."""
    return max(1, rules * len(recipe.adapter_methods))


def _settings(recipe: Recipe, rules: int) -> dict[str, str]:
    return engine_settings(recipe) | {"max_loras": str(_slots(recipe, rules))}


def _inputs(recipe: Recipe, runs: Runs, beside: Recipe | None, grid: EncoderGrid) -> str:
    """Recipes, weights, grid, machine, threads, packages, and our code that measures and is
    measured.
    """
    inputs: list[Any] = [asdict(grid), hardware(), versions(), threads()]
    for one_of_both in _recipes(recipe, beside):
        inputs += [one_of_both.model_dump(), one_of_both.base_revision]
        for card in sorted((runs.root / one_of_both.name).glob("*/*/card.json")):
            inputs.append(read_card(card.parent).weights_sha256)
    here = Path(__file__)
    return fingerprint(*inputs, *CODE, here, *sorted((here.parent / "workload").glob("*.py")))


@contextlib.contextmanager
def _contestants(
    recipe: Recipe, runs: Runs, rules: int, engines: int
) -> Iterator[list[MethodOnBase]]:
    """The methods of a recipe in one engine, one of so many."""
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
        slots = _slots(recipe, rules)
        engine = GuardEngine(recipe, copied, max_loras=slots, **memory_beside(engines))
        stack.enter_context(engine)
        contestants: list[MethodOnBase] = []
        for method in methods:
            of_method = MethodOnBase(recipe.name, method, weights[method], engine, names[method])
            contestants.append(of_method)
        yield contestants


def _measured(
    recipe: Recipe, contestants: Sequence[MethodOnBase], grid: EncoderGrid
) -> list[EncoderCell]:
    prompts = prompt_builder(recipe)
    planned: list[PlannedCell] = []
    for contestant, size, count in itertools.product(contestants, grid.tokens, grid.rules):
        if contestant.reads(size, count) <= LARGEST_CELL:
            planned.append(PlannedCell(contestant, size, count))
    samples: list[list[EncoderSample]] = [[] for _ in planned]
    for repeat in range(-1, grid.repeats):  # the first warms up
        order = random.Random(repeat).sample(range(len(planned)), len(planned))
        for index in order:
            cell = planned[index]
            messages = conversation(prompts, cell.tokens, seed=repeat + 1)
            sample = _check(cell, messages)
            if repeat >= 0:
                samples[index].append(sample)
    cells: list[EncoderCell] = []
    for cell, of_cell in zip(planned, samples, strict=True):
        measured = EncoderCell(
            model=cell.contestant.model,
            method=cell.contestant.method,
            tokens=cell.tokens,
            rules=cell.rules,
            wall_ms=Spread.of([sample.wall_ms for sample in of_cell]),
            computed_tokens=of_cell[-1].computed_tokens,
            swap_ins=max(sample.swap_ins for sample in of_cell),
        )
        cells.append(measured)
    return cells


def _check(cell: PlannedCell, messages: tuple[Message, ...]) -> EncoderSample:
    """Raises GuardError if a rule was not judged."""
    engine, names = cell.contestant.engine, cell.contestant.names[: cell.rules]
    engine.forget()
    swap_ins, started = engine.swap_ins, time.perf_counter()
    check = engine.check(messages, names)
    wall_ms = (time.perf_counter() - started) * 1000
    judged(check, where=f"{cell.contestant.method} on {cell.contestant.model}")
    return EncoderSample(wall_ms, check.computed_tokens, engine.swap_ins - swap_ins)


def crossover(first: Sequence[EncoderCell], second: Sequence[EncoderCell]) -> float | None:
    """From how many rules on `second` is faster than `first`, between the measured numbers on
    straight lines of log ms over log rules. 1 where it always is; None where it never is.
    """
    before: tuple[float, float] | None = None
    for cell, other_cell in zip(first, second, strict=False):
        lead = math.log(cell.wall_ms.median / other_cell.wall_ms.median)
        if lead > 0 and before is None:
            return float(cell.rules)
        if lead > 0 and before is not None:
            start, deficit = before
            share = -deficit / (lead - deficit)
            return math.exp(start + share * (math.log(cell.rules) - start))
        before = math.log(cell.rules), lead
    return None


def table(report: EncoderReport) -> str:
    """The report as text."""
    lines = ["ms for N rules on one conversation, median (smallest to largest):"]
    lines.append(f"{'model':<16}{'method':<8}{'tokens':>8}{'rules':>8}{'computed':>10}  ms")
    for cell in report.cells:
        counts = f"{cell.tokens:>8,}{cell.rules:>8}{cell.computed_tokens:>10,}"
        lines.append(f"{cell.model:<16}{cell.method:<8}{counts}  {cell.wall_ms.text(1)}")
    swap_ins = max(cell.swap_ins for cell in report.cells)
    lines.append(f"swap-ins while the clock ran: {swap_ins}; {_adapters(report)}")
    if report.beside != NOBODY:
        lines += _crossovers(report)
    return "\n".join(lines)


def _adapters(report: EncoderReport) -> str:
    """Which rules are trained and which are not: `trained: minilm lora, minilm head`."""
    names: dict[Weights, list[str]] = {}
    for model, methods in report.adapters.items():
        for method, weights in methods.items():
            names.setdefault(weights, []).append(f"{model} {method}")
    return "; ".join(f"{weights}: {', '.join(of_these)}" for weights, of_these in names.items())


def _crossovers(report: EncoderReport) -> list[str]:
    lines: list[str] = []
    for tokens in sorted({cell.tokens for cell in report.cells}):
        adapters = report.line(report.model, report.adapter_method(report.model), tokens)
        shared = report.line(report.beside, report.adapter_method(report.beside), tokens)
        rules = crossover(adapters, shared)
        where = "at no number of rules measured"
        if rules is not None:
            where = f"from {rules:.1f} rules on"
        lines.append(
            f"{tokens:,} tokens: aLoRAs on {report.beside} are faster than adapters on "
            f"{report.model} {where}"
        )
    return lines


def draw(report: EncoderReport, path: Path) -> None:
    """Write the plot: time to all verdicts against the number of rules, a panel for each length."""
    sizes = sorted({cell.tokens for cell in report.cells})
    lines = dict.fromkeys((cell.model, cell.method) for cell in report.cells)
    figure = new_figure(1 + 4.5 * len(sizes), 5)
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, tokens in zip(panels, sizes, strict=True):
        for model, method in lines:
            cells = report.line(model, method, tokens)
            plot_spreads(
                axes,
                [cell.rules for cell in cells],
                [cell.wall_ms for cell in cells],
                color=METHOD_COLOURS[method],
                marker=METHOD_MARKERS[method],
                linestyle=LINES[model == report.model],
                label=f"{METHODS[method].label} on {model}",
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(linewidth=0.4, alpha=0.6)
        axes.set_xlabel("rules on one conversation")
        axes.set_title(f"{tokens:,} tokens")
    panels[0].set_ylabel("ms to all verdicts")
    panels[0].legend(frameon=False)
    caption = f"{source(report)}; median of {report.repeats} repeats; {_adapters(report)}."
    save_figure(figure, caption, path, columns=140)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_count(parser, "--repeats", REPEATS, "conversations per cell")
    text = f"the decoder to measure beside it, or {NOBODY}"
    add_option(parser, "--beside", BESIDE, text)
    parser.add_argument("--quick", action="store_true", help="a coarse grid, a minute")
    parser.add_argument(
        "--force", action="store_true", help="measure again although nothing changed"
    )


def main(arguments: argparse.Namespace) -> None:
    """Measure, or say that nothing changed, and print the table."""
    grid = replace(FULL, repeats=arguments.repeats)
    if arguments.quick:
        grid = QUICK
    beside = None
    if arguments.beside != NOBODY:
        beside = load_recipe(arguments.beside)
    recipe, runs = load_recipe(arguments.model), Runs(arguments.runs)
    publish_run(recipe, runs, grid, beside, force=arguments.force)


def publish_run(
    recipe: Recipe,
    runs: Runs,
    grid: EncoderGrid,
    beside: Recipe | None = None,
    *,
    force: bool = False,
) -> None:
    """Measure, or say that nothing changed; write the report and the plot, print the table."""
    _check_encoder(recipe)
    path = runs.root / REPORT
    grids = {grid}
    if grid.repeats <= FULL.repeats:
        grids.add(FULL)
    report = _current(path, {_inputs(recipe, runs, beside, of_grid) for of_grid in grids})
    if report is None or force:
        report = run(recipe, runs, beside, grid)
    else:
        print(f"nothing changed since {path} was measured; FORCE=1 measures again")
    publish(report, path, table, draw)


def _current(path: Path, inputs: Collection[str]) -> EncoderReport | None:
    """The report at `path` if it was made from one of these inputs: a full grid stands for a
    coarse one.
    """
    try:
        report = EncoderReport.load(path)
    except (OSError, ValueError, GuardError):  # none, or of another version: measured again
        return None
    if report.inputs not in inputs:
        return None
    return report
