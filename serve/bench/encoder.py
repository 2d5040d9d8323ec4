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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from guard.errors import GuardError
from guard.example import Message
from guard.files.yaml_file import Strict
from guard.layout import Runs
from guard.method import METHODS
from guard.prompt.builders import prompt_builder
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count, add_option
from serve.bench.memory import memory_beside
from serve.bench.plot import METHOD_COLOURS, METHOD_MARKERS, new_figure, plot_spreads, save_figure
from serve.bench.report import BenchReport, Spread, engine_settings, origin, publish, source
from serve.bench.workload.adapter_folders import copies
from serve.bench.workload.prompts import conversation
from serve.bench.workload.random_adapter import random_adapters
from serve.engine import GuardEngine
from serve.engine.adapter import trained

RULES = (1, 2, 5, 20, 100)
TOKENS = (120, 450, 2000)  # of a conversation; the last is read in several windows
LARGEST_CELL = 50_000  # tokens read: half a minute a check on one core
REPEATS = 5
QUICK_REPEATS = 2
NOBODY = "none"
LINES = {True: "-", False: "--"}  # of the encoder, of the decoder beside it
REPORT = "encoder_bench.json"


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


class EncoderReport(BenchReport):
    """Everything in `runs/encoder_bench.json`."""

    engine: dict[str, str]
    beside: str  # the decoder's recipe, or NOBODY
    repeats: int
    cells: tuple[EncoderCell, ...]

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
    engine: GuardEngine
    names: Sequence[str]

    def reads(self, tokens: int, rules: int) -> int:
        """How many tokens a check reads, about."""
        if METHODS[self.method].shares_conversation:
            return tokens
        return tokens * rules


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
    rules: Sequence[int] = RULES,
    tokens: Sequence[int] = TOKENS,
    repeats: int = REPEATS,
) -> EncoderReport:
    """Measure every cell. Raises GuardError for a decoder."""
    if not recipe.is_encoder:
        remedy = "Name an encoder, as MODEL=minilm; for this one, `make serve`"
        raise GuardError("not an encoder", where=f"recipe {recipe.name}", remedy=remedy)
    recipes = [recipe]
    decoder = NOBODY
    if beside is not None:
        recipes.append(beside)
        decoder = beside.name
    with contextlib.ExitStack() as stack:
        contestants: list[MethodOnBase] = []
        for one_of_both in recipes:
            of_recipe = _contestants(one_of_both, runs, max(rules), len(recipes))
            contestants += stack.enter_context(of_recipe)
        cells = _measured(recipe, contestants, rules, tokens, repeats)
    return EncoderReport(
        **origin(recipe),
        engine=engine_settings(recipe) | {"max_loras": str(max(rules))},
        beside=decoder,
        repeats=repeats,
        cells=tuple(cells),
    )


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
        for method in methods:
            try:
                folders[method] = list(trained(runs, recipe.name, method).values())
            except GuardError:
                made = stack.enter_context(random_adapters(recipe, [method], 1))
                folders[method] = list(made[method].values())
                print(f"{recipe.name} {method}: random weights, no rule is trained", flush=True)
        names, copied = copies(folders, rules)
        print(f"loading {recipe.name} with {len(copied)} rules", flush=True)
        engine = GuardEngine(recipe, copied, max_loras=rules, **memory_beside(engines))
        stack.enter_context(engine)
        yield [MethodOnBase(recipe.name, method, engine, names[method]) for method in methods]


def _measured(
    recipe: Recipe,
    contestants: Sequence[MethodOnBase],
    rules: Sequence[int],
    tokens: Sequence[int],
    repeats: int,
) -> list[EncoderCell]:
    prompts = prompt_builder(recipe)
    grid: list[PlannedCell] = []
    for contestant, size, count in itertools.product(contestants, tokens, rules):
        if contestant.reads(size, count) <= LARGEST_CELL:
            grid.append(PlannedCell(contestant, size, count))
    walls: list[list[float]] = [[] for _ in grid]
    computed = [0] * len(grid)
    for repeat in range(-1, repeats):  # the first warms up
        order = random.Random(repeat).sample(range(len(grid)), len(grid))
        for index in order:
            cell = grid[index]
            messages = conversation(prompts, cell.tokens, seed=repeat + 1)
            wall_ms, computed[index] = _check(cell, messages)
            if repeat >= 0:
                walls[index].append(wall_ms)
    cells: list[EncoderCell] = []
    for cell, of_cell, tokens_computed in zip(grid, walls, computed, strict=True):
        measured = EncoderCell(
            model=cell.contestant.model,
            method=cell.contestant.method,
            tokens=cell.tokens,
            rules=cell.rules,
            wall_ms=Spread.of(of_cell),
            computed_tokens=tokens_computed,
        )
        cells.append(measured)
    return cells


def _check(cell: PlannedCell, messages: tuple[Message, ...]) -> tuple[float, int]:
    """Milliseconds, and computed tokens. Raises GuardError if a rule was not judged."""
    engine, names = cell.contestant.engine, cell.contestant.names[: cell.rules]
    engine.forget()
    started = time.perf_counter()
    check = engine.check(messages, names)
    wall_ms = (time.perf_counter() - started) * 1000
    if check.refused:
        rule, refusal = next(iter(check.refused.items()))
        raise GuardError("a rule was not judged", where=rule, got=refusal.why)
    return wall_ms, check.computed_tokens


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
    if report.beside != NOBODY:
        lines += _crossovers(report)
    return "\n".join(lines)


def _crossovers(report: EncoderReport) -> list[str]:
    lines: list[str] = []
    for tokens in sorted({cell.tokens for cell in report.cells}):
        adapters = report.line(report.model, "lora", tokens)
        shared = report.line(report.beside, "alora", tokens)
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
    save_figure(figure, f"{source(report)}; median of {report.repeats} repeats.", path, columns=140)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_count(parser, "--repeats", REPEATS, "conversations per cell")
    text = f"the decoder to measure beside it, or {NOBODY}"
    add_option(parser, "--beside", "tiny", text)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REPEATS} a cell")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and the plot, print the table."""
    repeats = QUICK_REPEATS if arguments.quick else arguments.repeats
    beside = None if arguments.beside == NOBODY else load_recipe(arguments.beside)
    publish_run(load_recipe(arguments.model), Runs(arguments.runs), repeats, beside)


def publish_run(recipe: Recipe, runs: Runs, repeats: int, beside: Recipe | None = None) -> None:
    """Measure, write the report and the plot, print the table."""
    publish(run(recipe, runs, beside, repeats=repeats), runs.root / REPORT, table, draw)
