"""How long N rules on an encoder take on one conversation, by the recipe's methods.

    lora    N adapters, each with its head: each reads the conversation, all of them in one batch
    head    N heads on the frozen encoder: the conversation is read once

Methods in one engine, interleaved, on the same conversations; a fresh one for every repeat. The
trained rules are loaded again under other names, and every adapter has a slot. Cells of more than
LARGEST_CELL tokens in all are left out. Knows nothing of what the verdicts mean.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from guard.errors import GuardError
from guard.example import Message
from guard.files.yaml_file import Strict
from guard.layout import Runs
from guard.prompt.builders import prompt_builder
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count
from serve.bench.report import BenchReport, Spread, engine_settings, origin, publish
from serve.bench.workload.adapter_folders import copies
from serve.bench.workload.prompts import conversation
from serve.engine import GuardEngine
from serve.engine.adapter import trained

RULES = (1, 20, 100)
TOKENS = (120, 450, 2000)  # of a conversation; the last is read in several windows
LARGEST_CELL = 50_000  # rules times tokens: half a minute a check on one core
REPEATS = 5
QUICK_REPEATS = 2
REPORT = "encoder_bench.json"


class EncoderCell(Strict):
    """What `rules` rules of a method took on conversations of so many tokens."""

    method: str
    tokens: int
    rules: int
    wall_ms: Spread
    computed_tokens: int  # in a repeat


class EncoderReport(BenchReport):
    """Everything in `runs/encoder_bench.json`."""

    engine: dict[str, str]
    repeats: int
    cells: tuple[EncoderCell, ...]


def run(
    recipe: Recipe,
    runs: Runs,
    rules: Sequence[int] = RULES,
    tokens: Sequence[int] = TOKENS,
    repeats: int = REPEATS,
) -> EncoderReport:
    """Measure every cell. Raises GuardError for a decoder, or if no rule is trained."""
    if not recipe.is_encoder:
        remedy = "Name an encoder, as MODEL=minilm; for this one, `make serve`"
        raise GuardError("not an encoder", where=f"recipe {recipe.name}", remedy=remedy)
    folders: dict[str, list[Path]] = {}
    for method in recipe.methods:
        folders[method] = list(trained(runs, recipe.name, method).values())
    names, copied = copies(folders, max(rules))
    slots = max(rules)
    print(f"loading {recipe.name} with {len(copied)} rules", flush=True)
    with GuardEngine(recipe, copied, max_loras=slots) as engine:
        cells = _measured(recipe, engine, names, rules, tokens, repeats)
    settings = engine_settings(recipe) | {"max_loras": str(slots)}
    return EncoderReport(**origin(recipe), engine=settings, repeats=repeats, cells=tuple(cells))


def _measured(
    recipe: Recipe,
    engine: GuardEngine,
    names: Mapping[str, Sequence[str]],
    rules: Sequence[int],
    tokens: Sequence[int],
    repeats: int,
) -> list[EncoderCell]:
    prompts = prompt_builder(recipe)
    grid: list[tuple[str, int, int]] = []
    for method, (size, count) in itertools.product(names, itertools.product(tokens, rules)):
        if size * count <= LARGEST_CELL:
            grid.append((method, size, count))
    walls: dict[tuple[str, int, int], list[float]] = {cell: [] for cell in grid}
    computed: dict[tuple[str, int, int], int] = {}
    for repeat in range(-1, repeats):  # the first warms up
        for cell in random.Random(repeat).sample(grid, len(grid)):
            method, size, count = cell
            messages = conversation(prompts, size, seed=repeat + 1)
            wall_ms, computed[cell] = _check(engine, messages, names[method][:count])
            if repeat >= 0:
                walls[cell].append(wall_ms)
    return [
        EncoderCell(
            method=method,
            tokens=size,
            rules=count,
            wall_ms=Spread.of(walls[method, size, count]),
            computed_tokens=computed[method, size, count],
        )
        for method, size, count in grid
    ]


def _check(
    engine: GuardEngine, messages: tuple[Message, ...], names: Sequence[str]
) -> tuple[float, int]:
    """Milliseconds, and computed tokens. Raises GuardError if a rule was not judged."""
    started = time.perf_counter()
    check = engine.check(messages, names)
    wall_ms = (time.perf_counter() - started) * 1000
    if check.refused:
        rule, refusal = next(iter(check.refused.items()))
        raise GuardError("a rule was not judged", where=rule, got=refusal.why)
    return wall_ms, check.computed_tokens


def table(report: EncoderReport) -> str:
    """The report as text."""
    lines = ["ms for N rules on one conversation, median (smallest to largest):"]
    lines.append(f"{'method':<8}{'tokens':>8}{'rules':>8}{'computed':>10}  ms")
    for cell in report.cells:
        counts = f"{cell.tokens:>8,}{cell.rules:>8}{cell.computed_tokens:>10,}"
        lines.append(f"{cell.method:<8}{counts}  {cell.wall_ms.text(1)}")
    return "\n".join(lines)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_count(parser, "--repeats", REPEATS, "conversations per cell")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REPEATS} a cell")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and print the table."""
    repeats = QUICK_REPEATS if arguments.quick else arguments.repeats
    publish_run(load_recipe(arguments.model), Runs(arguments.runs), repeats)


def publish_run(recipe: Recipe, runs: Runs, repeats: int) -> None:
    """Measure, write the report and print the table."""
    publish(run(recipe, runs, repeats=repeats), runs.root / REPORT, table)
