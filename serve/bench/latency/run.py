"""How long N rules take on one conversation.

Modes in one engine, interleaved, on the same conversations:

    base    the bare base model, N prompts with the rules' titles, which it has to read: the cost
            without adapters
    lora    N standard LoRAs: each must prefill the conversation for itself
    alora   N aLoRAs: the conversation is prefilled once

Every repeat has a fresh conversation, and every measurement starts with an empty prefix cache. As
many distinct adapters as rules are resident: the trained ones, loaded again under other names. All
numbers of a report come from one run, so an interrupted run starts from the beginning. Knows
nothing of what the verdicts mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guard.arguments import count
from guard.errors import GuardError
from guard.layout import Runs, fingerprint, running_code
from guard.machine.provenance import hardware, versions
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from guard.weights.card import load_card
from serve.bench.encoder import run as encoder
from serve.bench.latency.grid import (
    LENGTHS_OF_RULES_SWEEP,
    LORA_REPEATS,
    RULES_OF_LENGTH_SWEEP,
    Cell,
    by_engine,
    full_grid,
    quick_grid,
)
from serve.bench.latency.measure import LatencyMeter, Measured, measure
from serve.bench.latency.plots import draw_length, draw_rules
from serve.bench.latency.report import CellRow, LatencyReport, table
from serve.bench.latency.summary import cell_rows, marginal_costs, ratio_row
from serve.bench.report import engine_settings, origin, shared_code, threads
from serve.bench.workload.adapter_folders import MARGIN_TOKENS, Folders, adapter_folders, copies
from serve.engine import CODE, GuardEngine

# What measures and what is measured, as it is when this process begins.
MEASURING_CODE = (*CODE, *sorted(Path(__file__).parent.glob("*.py")), *shared_code())
REPEATS = 20
QUICK_S = 120  # how long measuring the coarse grid may take


@dataclass(frozen=True)
class EnginePart:
    """What one engine measured.

    `engine`: its arguments beside the recipe's. `suffix_tokens`: the tokens of a rule's suffix, by
    number of rules and mode.
    """

    engine: dict[str, Any]
    measured: Measured
    suffix_tokens: dict[int, dict[str, int]]

    def cell_rows(self) -> list[CellRow]:
        """A row for every mode of every cell."""
        rows = []
        for cell, repeats in self.measured.repeats.items():
            rows += cell_rows(cell, repeats, self.suffix_tokens[cell.rules])
        return rows


def run(
    recipe: Recipe,
    folders: Folders,
    grid: Sequence[Cell],
    inputs: str,
    *,
    is_random: bool = False,
    seconds: float | None = None,
) -> LatencyReport:
    """Measure the grid. Each part has an engine of its own, with as many adapters of each method as
    it has rules, made from `folders`. `inputs`: the fingerprint of what is measured, from before.
    """
    parts = [_part(recipe, folders, cells, seconds) for cells in by_engine(grid)]
    rows, ratios, costs = [], [], []
    left_out: list[str] = []
    for part in parts:
        rows += part.cell_rows()
        ratios += [ratio_row(*item) for item in part.measured.repeats.items()]
        costs += marginal_costs(part.measured.repeats)
        left_out += part.measured.left_out
    return LatencyReport(
        **origin(recipe),
        threads=threads(),
        adapters="random weights" if is_random else "trained",
        inputs=inputs,
        engine=engine_settings(recipe) | _own_arguments(parts),
        left_out=tuple(left_out),
        cells=tuple(rows),
        ratios=tuple(ratios),
        marginal_costs=tuple(costs),
    )


def _own_arguments(parts: Sequence[EnginePart]) -> dict[str, str]:
    """The arguments that engines have beside the recipe's, with all values of each."""
    arguments: dict[str, list[str]] = {}
    for part in parts:
        for key, value in part.engine.items():
            arguments.setdefault(key, []).append(str(value))
    return {key: ", ".join(dict.fromkeys(values)) for key, values in arguments.items()}


def _part(
    recipe: Recipe, folders: Folders, grid: Sequence[Cell], seconds: float | None
) -> EnginePart:
    """Measure the cells of one engine. Every adapter has a slot, so that none is loaded while the
    clock runs.
    """
    rules = max(cell.rules for cell in grid)
    names, adapters = copies(folders, rules)
    overrides: dict[str, Any] = {"max_loras": max(len(adapters), recipe.engine.get("max_loras", 0))}
    overrides |= _room(recipe, max(cell.prompt_tokens for cell in grid) + MARGIN_TOKENS)
    print(f"loading {recipe.name} with {len(adapters)} adapters", flush=True)
    with GuardEngine(recipe, adapters, **overrides) as engine:
        context_tokens = overrides.get("max_model_len", recipe.context_tokens)
        meter = LatencyMeter(engine, PromptBuilder.of(recipe), context_tokens, names)
        meter.warm_up()
        measured = measure(meter, grid, seconds)
        suffix_tokens: dict[int, dict[str, int]] = {}
        for cell in grid:
            suffix_tokens[cell.rules] = {
                mode: meter.suffix_tokens(cell.rules, mode) for mode in meter.modes
            }
    return EnginePart(overrides, measured, suffix_tokens)


def _room(recipe: Recipe, tokens: int) -> dict[str, Any]:
    """Engine arguments for prompts of `tokens`.

    Beyond the context that the base was made for, its verdicts mean nothing but take as long.
    """
    if tokens <= recipe.context_tokens:
        return {}
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(recipe.base_path, revision=recipe.commit)
    arguments: dict[str, Any] = {"max_model_len": tokens}
    if tokens > config.max_position_embeddings:
        arguments["hf_overrides"] = {"max_position_embeddings": tokens}
    return arguments


def publish(report: LatencyReport, runs: Runs) -> None:
    """Write `latency.json` and the two plots beside it, and print the table."""
    by_length, by_rules = runs.root / "latency_length.png", runs.root / "latency_rules.png"
    report.save(runs.latency)
    draw_length(report, RULES_OF_LENGTH_SWEEP, by_length)
    lengths = [row.prompt_tokens for row in report.ratios]
    swept = [length for length in LENGTHS_OF_RULES_SWEEP if lengths.count(length) > 1]
    draw_rules(report, swept, by_rules)
    print(table(report))
    print(f"written: {runs.latency}, {by_length}, {by_rules}")


def _inputs(recipe: Recipe, folders: Folders, is_random: bool) -> str:
    """The fingerprint of what the numbers depend on besides the grid: adapters, recipe, machine,
    threads, packages, and our code that measures and is measured.
    """
    weights = []
    for method_folders in folders.values():
        weights += [load_card(folder).version for folder in method_folders]
    made_with = recipe.model_dump(), recipe.base_revision, weights, is_random
    code = running_code(MEASURING_CODE)
    return fingerprint(*made_with, hardware(), versions(), threads(), code)


def _current(path: Path, inputs: str, grid: Sequence[Cell]) -> LatencyReport | None:
    """The report at `path` if it was made from these inputs and has at least this grid: a full grid
    stands for a coarse one.
    """
    try:
        report = LatencyReport.load(path)
    except (OSError, ValueError, GuardError):  # no report of this version: measured again
        return None
    repeats: dict[tuple[int, int], int] = {}
    for row in report.cells:
        point = (row.prompt_tokens, row.rules)
        repeats[point] = max(row.repeats, repeats.get(point, 0))
    for cell in grid:
        if not cell.optional and repeats.get((cell.prompt_tokens, cell.rules), 0) < cell.repeats:
            return None
    if report.inputs != inputs:
        return None
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    capped = f"at most 2 with --quick, {LORA_REPEATS} with LoRA"
    text = f"conversations per cell; {capped} (default: {REPEATS})"
    parser.add_argument("--repeats", type=count, help=text)
    texts = {
        "--quick": "a coarse grid, about two minutes on two cores with the tiny base",
        "--wide": "also 500 rules, with 1,000 adapters resident, and 10,000 to 32,000 tokens",
        "--random": "adapters with random weights instead of trained ones",
        "--force": "measure again although nothing changed",
    }
    for flag, text in texts.items():
        parser.add_argument(flag, action="store_true", help=text)


def main(arguments: argparse.Namespace) -> None:
    """Measure, or say that nothing changed, and print the table.

    An encoder has neither aLoRAs nor a base that answers: it is measured as `make bench
    NAME=encoder` does. Raises GuardError for options that this does not take.
    """
    recipe, runs = load_recipe(arguments.model), Runs(arguments.runs)
    if recipe.is_encoder:
        _refuse_options_of_a_decoder(recipe, arguments)
        encoder_grid = encoder.FULL
        if arguments.quick:
            encoder_grid = encoder.QUICK
        beside = load_recipe(encoder.BESIDE)
        encoder.publish_run(recipe, runs, encoder_grid, beside, force=arguments.force)
        return
    repeats = arguments.repeats or REPEATS
    grid, seconds = full_grid(repeats, wide=arguments.wide), None
    if arguments.quick:
        grid, seconds = quick_grid(repeats), QUICK_S
    with adapter_folders(recipe, runs, is_random=arguments.random) as folders:
        inputs = _inputs(recipe, folders, arguments.random)
        report = _current(runs.latency, inputs, grid)
        if report is None or arguments.force:
            report = run(recipe, folders, grid, inputs, is_random=arguments.random, seconds=seconds)
        else:
            print(f"nothing changed since {runs.latency} was measured; FORCE=1 measures again")
    publish(report, runs)


def _refuse_options_of_a_decoder(recipe: Recipe, arguments: argparse.Namespace) -> None:
    for option in ("wide", "random", "repeats"):
        if getattr(arguments, option):
            raise GuardError(
                "only decoders are measured with this option",
                where=f"recipe {recipe.name}",
                got=f"--{option}",
                remedy="Leave it out; make bench NAME=encoder OPTIONS=--help has an encoder's own",
            )
