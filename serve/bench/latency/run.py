"""The latency benchmark: `python -m serve.bench.latency.run`, entry of `make serve`. Knows nothing of what the verdicts mean.

How long do N rules take on one conversation? Three modes in one engine, interleaved, on the same conversations:

    base    the bare base model, N prompts with the rules' titles, which it has to be told: what it costs without adapters
    lora    N standard LoRAs: each must prefill the conversation for itself
    alora   N aLoRAs: the conversation is prefilled once

Every repeat has a fresh conversation, and every measurement starts with an empty prefix cache. As many distinct adapters as rules are
resident: the trained ones, loaded again under other names. All numbers of a report come from one run, so a run that was interrupted
starts again.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guard.card import load_card
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs, fingerprint
from guard.method import METHODS
from guard.prompt import PromptBuilder
from guard.provenance import hardware, peak_memory_mib, provenance, versions
from guard.recipe import Recipe, load_recipe
from serve.bench.latency.grid import (
    LENGTHS_OF_RULES_SWEEP,
    LORA_REPEATS,
    QUICK_S,
    RULES_OF_LENGTH_SWEEP,
    Bench,
    Cell,
    by_engine,
    full_grid,
    further_rules,
    measure,
    quick_grid,
    summarise,
)
from serve.bench.latency.report import (
    CellRow,
    FurtherRow,
    LatencyReport,
    RatioRow,
    draw_length,
    draw_rules,
    table,
)
from serve.engine import CODE, GuardEngine
from serve.engine.adapter import Requirements, trained

MARGIN = 200  # tokens: of a rule, and by which a repeat is longer than its cell


def run(
    recipe: Recipe,
    folders: Mapping[str, Sequence[Path]],
    grid: Sequence[Cell],
    *,
    is_random: bool = False,
    seconds: float | None = None,
) -> LatencyReport:
    """Measure the grid, each of its parts in an engine with as many adapters of each method as it has rules, made from `folders`."""
    parts = [_measured(recipe, folders, part, seconds) for part in by_engine(grid)]
    own = {
        key: dict.fromkeys(str(part.engine[key]) for part in parts if key in part.engine)
        for part in parts
        for key in part.engine
    }
    engine = {key: str(value) for key, value in (recipe.engine | {"dtype": recipe.dtype}).items()}
    engine |= {
        key: ", ".join(values) for key, values in own.items()
    }  # of each engine, where they differ
    return LatencyReport(
        **provenance(),
        model=recipe.name,
        peak_memory_mib=peak_memory_mib(),
        adapters="random weights" if is_random else "trained",
        inputs=_inputs(recipe, folders, is_random),
        engine=engine,
        left_out=tuple(cell for part in parts for cell in part.left_out),
        cells=tuple(row for part in parts for row in part.rows),
        ratios=tuple(ratio for part in parts for ratio in part.ratios),
        further=tuple(row for part in parts for row in part.further),
    )


@dataclass(frozen=True)
class Part:
    """What one engine measured, and its arguments beside the recipe's."""

    engine: dict[str, Any]
    rows: tuple[CellRow, ...]
    ratios: tuple[RatioRow, ...]
    further: tuple[FurtherRow, ...]
    left_out: tuple[str, ...]


def _measured(
    recipe: Recipe,
    folders: Mapping[str, Sequence[Path]],
    grid: Sequence[Cell],
    seconds: float | None,
) -> Part:
    rules = max(cell.rules for cell in grid)
    names: dict[str, list[str]] = {
        method: [f"{method}-{number}" for number in range(rules)] for method in METHODS
    }
    adapters = {
        name: folders[method][number % len(folders[method])]
        for method in METHODS
        for number, name in enumerate(names[method])
    }
    own = {
        "max_loras": max(len(adapters), recipe.engine.get("max_loras", 0))
    }  # no adapter is loaded while the clock runs
    own |= _room(recipe, max(cell.prompt_tokens for cell in grid) + MARGIN)
    prompts = PromptBuilder.of(recipe)
    print(f"loading {recipe.name} with {len(adapters)} adapters", flush=True)
    with GuardEngine(recipe, adapters, **own) as engine:
        bench = Bench(engine, prompts, own.get("max_model_len", recipe.context_tokens), names)
        bench.warm_up()
        measured, left_out = measure(bench, grid, seconds)
        summaries = [
            summarise(cell, repeats, bench.suffix_tokens(cell.rules))
            for cell, repeats in measured.items()
        ]
    rows, ratios = (
        tuple(row for rows, _ in summaries for row in rows),
        tuple(ratio for _, ratio in summaries),
    )
    return Part(own, rows, ratios, tuple(further_rules(measured)), tuple(left_out))


def _room(recipe: Recipe, tokens: int) -> dict[str, Any]:
    """Engine arguments for prompts of `tokens`. Beyond what the base was made for its verdicts say nothing, and take as long."""
    if tokens <= recipe.context_tokens:
        return {}
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(recipe.base_path, revision=recipe.commit)
    is_beyond = tokens > config.max_position_embeddings
    return {"max_model_len": tokens} | (
        {"hf_overrides": {"max_position_embeddings": tokens}} if is_beyond else {}
    )


def publish(report: LatencyReport, runs: Runs) -> None:
    """Write `latency.json` and the two plots beside it."""
    report.save(runs.latency)
    draw_length(report, RULES_OF_LENGTH_SWEEP, runs.root / "latency_length.png")
    measured = [
        length
        for length in LENGTHS_OF_RULES_SWEEP
        if sum(row.prompt_tokens == length for row in report.ratios) > 1
    ]
    draw_rules(report, measured, runs.root / "latency_rules.png")


@contextlib.contextmanager
def _folders(recipe: Recipe, runs: Runs, is_random: bool) -> Iterator[dict[str, list[Path]]]:
    """The adapter folders to measure with, by method."""
    if not is_random:
        try:
            found = {
                method: _servable(trained(runs, recipe.name, method), recipe) for method in METHODS
            }
        except GuardError as error:
            remedy = f"{error.remedy}; or time adapters with random weights: .venv/bin/python -m serve.bench.latency.run --random"
            raise GuardError(error.what, where=error.where, got=error.got, remedy=remedy) from error
        yield found
        return
    from serve.bench.random_adapter import save_random_adapters

    prompts = PromptBuilder.of(recipe)
    with tempfile.TemporaryDirectory() as scratch:
        made: dict[str, list[Path]] = {method: [Path(scratch) / method] for method in METHODS}
        for method, (folder,) in made.items():
            save_random_adapters([folder], recipe, method, prompts)
        yield made


def _servable(found: Mapping[str, Path], recipe: Recipe) -> list[Path]:
    """The folders that this base can serve; of the others it prints why not. Raises GuardError if there is none."""
    requirements, servable, refused = Requirements.of(recipe), [], []
    for name, folder in found.items():
        try:
            servable.append(requirements.admit(name, folder).folder)
        except GuardError as error:
            refused.append(error)
    if not servable:
        raise refused[0]
    for each in refused:
        print(f"left out: {each}", flush=True)
    return servable


def _inputs(recipe: Recipe, folders: Mapping[str, Sequence[Path]], is_random: bool) -> str:
    """What the numbers depend on besides the grid: adapters, recipe, machine, packages, and our code that runs while the clock does."""
    weights = [load_card(folder).weights_sha256 for method in METHODS for folder in folders[method]]
    here = Path(__file__).parent
    code = (*CODE, here / "grid.py", here.parent / "workload.py")
    return fingerprint(
        recipe.model_dump(), recipe.base_revision, weights, is_random, hardware(), versions(), *code
    )


def _current(path: Path, inputs: str, grid: Sequence[Cell]) -> LatencyReport | None:
    """The report at `path` if it was made from these inputs and holds at least this grid: a full one stands for a coarse one."""
    try:
        report = LatencyReport.load(path)
    except (
        OSError,
        ValueError,
        GuardError,
    ):  # none, or one of another version: measured again either way
        return None
    repeats = {(row.prompt_tokens, row.rules): row.repeats for row in report.cells}
    is_covered = all(
        cell.optional or repeats.get((cell.prompt_tokens, cell.rules), 0) >= cell.repeats
        for cell in grid
    )
    return report if report.inputs == inputs and is_covered else None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.bench.latency.run",
        description="Measure how long 1 to 100 rules take on one conversation.",
    )
    parser.add_argument(
        "--model", default="tiny", help="a base model of recipes/models (default: %(default)s)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a coarse grid, about two minutes on two cores with the tiny base",
    )
    parser.add_argument(
        "--wide",
        action="store_true",
        help="also 500 rules, with 1,000 adapters resident, and conversations of 10,000 to 32,000 tokens",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=20,
        help=f"conversations per cell (default: %(default)s; at most 2 with --quick, {LORA_REPEATS} with LoRA)",
    )
    parser.add_argument(
        "--random", action="store_true", help="adapters with random weights instead of trained ones"
    )
    parser.add_argument(
        "--force", action="store_true", help="measure again although nothing changed"
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Runs().root,
        help="where the adapters are and the results go (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    return arguments


@exits_cleanly
def main() -> None:
    """Measure, or say that nothing changed, and print the table."""
    arguments = _arguments()
    recipe, runs = load_recipe(arguments.model), Runs(arguments.runs)
    grid = (
        quick_grid(arguments.repeats)
        if arguments.quick
        else full_grid(arguments.repeats, wide=arguments.wide)
    )
    with _folders(recipe, runs, arguments.random) as folders:
        report = (
            None
            if arguments.force
            else _current(runs.latency, _inputs(recipe, folders, arguments.random), grid)
        )
        if report is not None:
            print(f"nothing changed since {runs.latency} was measured; FORCE=1 measures again")
            print(table(report))
            return
        report = run(
            recipe,
            folders,
            grid,
            is_random=arguments.random,
            seconds=QUICK_S if arguments.quick else None,
        )
    publish(report, runs)
    print(table(report))
    print(
        f"written: {runs.latency}, {runs.root / 'latency_length.png'}, {runs.root / 'latency_rules.png'}"
    )


if __name__ == "__main__":
    main()
