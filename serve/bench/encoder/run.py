"""How long N rules on an encoder take on one conversation, and beside them N aLoRAs on a decoder.

    lora    on the encoder: N adapters, each with its head: each reads the conversation
    head    on the encoder: N heads on the frozen base, which reads the conversation once
    alora   on the decoder of --beside: N adapters behind a conversation that is read once
    lora    on the decoder: N adapters, each of which reads the conversation

From some number of rules on, reading the conversation once is faster; the table states that number.
Both engines are in one process. Every check is put to one of them, in another order in every
repeat, and nothing is cached from one check to the next. Trained rules are loaded again and again
under other names; where none is trained, adapters with random weights are timed. Every adapter has
a slot. Cells are left out that would read more than `measure.LARGEST_CELL` tokens by their nominal
length; what a long conversation takes is more, because an encoder's windows overlap. Knows nothing
of what the verdicts mean.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from guard.errors import GuardError
from guard.layout import Runs, fingerprint, running_code
from guard.machine.provenance import hardware, versions
from guard.recipe import Recipe, load_recipe
from guard.weights.card import CARD, read_card
from serve.bench.command import add_count, add_option
from serve.bench.encoder.measure import EncoderGrid, MethodOnBase, measure, methods_on, slots
from serve.bench.encoder.plot import draw
from serve.bench.encoder.report import NOBODY, EncoderReport, Weights, table
from serve.bench.report import engine_settings, origin, publish, shared_code, threads
from serve.engine import CODE

# What measures and what is measured, as it is when this process begins.
MEASURING_CODE = (*CODE, *sorted(Path(__file__).parent.glob("*.py")), *shared_code())
REPEATS = 5
BESIDE = "tiny"
REPORT = "encoder_bench.json"

# Conversations of 2,000 tokens are read in several windows.
FULL = EncoderGrid((1, 2, 5, 20, 100), (120, 450, 2000), REPEATS)
QUICK = EncoderGrid((1, 20, 100), (120, 450), 2)


def run(
    recipe: Recipe,
    runs: Runs,
    beside: Recipe | None = None,
    grid: EncoderGrid = FULL,
) -> EncoderReport:
    """Measure every cell of the grid. Raises GuardError for a decoder."""
    _check_encoder(recipe)
    # Before it is measured: weights and code may change meanwhile.
    inputs = _inputs(recipe, runs, beside, grid)
    recipes = _recipes(recipe, beside)
    rules = max(grid.rules)
    with contextlib.ExitStack() as stack:
        contestants: list[MethodOnBase] = []
        for base_recipe in recipes:
            methods = methods_on(base_recipe, runs, rules, len(recipes))
            contestants += stack.enter_context(methods)
        cells = measure(recipe, contestants, grid)
    adapters: dict[str, dict[str, Weights]] = {base_recipe.name: {} for base_recipe in recipes}
    for contestant in contestants:
        adapters[contestant.model][contestant.method] = contestant.weights
    return EncoderReport(
        **origin(recipe),
        inputs=inputs,
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


def _settings(recipe: Recipe, rules: int) -> dict[str, str]:
    return engine_settings(recipe) | {"max_loras": str(slots(recipe, rules))}


def _inputs(recipe: Recipe, runs: Runs, beside: Recipe | None, grid: EncoderGrid) -> str:
    """The fingerprint of recipes, weights, grid, machine, threads, packages, and our code that
    measures and is measured.
    """
    inputs: list[Any] = [asdict(grid), hardware(), versions(), threads()]
    for base_recipe in _recipes(recipe, beside):
        inputs += [base_recipe.model_dump(), base_recipe.base_revision]
        for card in sorted((runs.root / base_recipe.name).glob(f"*/*/{CARD}")):
            inputs.append(read_card(card.parent).version)
    return fingerprint(*inputs, running_code(MEASURING_CODE))


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
    report = _current(path, {_inputs(recipe, runs, beside, stored_grid) for stored_grid in grids})
    if report is None or force:
        report = run(recipe, runs, beside, grid)
    else:
        print(f"nothing changed since {path} was measured; FORCE=1 measures again")
    publish(report, path, table, draw)


def _current(path: Path, inputs: Collection[str]) -> EncoderReport | None:
    """The report at `path` if it was made from one of these inputs: a full grid stands for a coarse
    one.
    """
    try:
        report = EncoderReport.load(path)
    except (OSError, ValueError, GuardError):  # no report of this version: measured again
        return None
    if report.inputs not in inputs:
        return None
    return report


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
