"""SGMV microbenchmark: the low-rank products of a step on the CPU, without an engine or a model.

Our code, vLLM's and a plain loop over adapters compute the same sums on the shapes of the base's
layers: y += x A^T B^T for every token with its own adapter. The lower bound is a roofline: the time
to read the adapters' weights once, or to multiply at the rate of a large matrix product, whichever
is longer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from tqdm import tqdm

from guard.errors import GuardError
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count
from serve.bench.report import origin, publish
from serve.bench.sgmv.batches import SgmvBatch, batches
from serve.bench.sgmv.layers import decoder_layers
from serve.bench.sgmv.machine import Machine, measured_machine
from serve.bench.sgmv.measure import TOLERANCE, measure
from serve.bench.sgmv.plot import draw
from serve.bench.sgmv.report import SgmvReport, SgmvRow, table

REPEATS = 15
PEFT_RANK = 8  # PEFT's default, for a recipe that states no rank


def run(
    recipe: Recipe,
    repeats: int = REPEATS,
    make_batches: Callable[[int], Sequence[SgmvBatch]] = batches,
    machine: Machine | None = None,
) -> SgmvReport:
    """Measure every operator on every batch, interleaved. Raises GuardError if two disagree.

    `machine`: its limits, if they are measured already.
    """
    rank: int = recipe.methods[recipe.sharing_method].lora.get("r", PEFT_RANK)
    machine = machine or measured_machine(recipe.dtype)
    measured_batches = make_batches(rank)
    rows: list[SgmvRow] = []
    with tqdm(total=len(measured_batches) * (repeats + 1), desc="measuring", unit="step") as bar:
        for batch in measured_batches:
            rows += measure(recipe, batch, rank, machine, repeats, bar)
    return SgmvReport(
        **origin(recipe),
        rank=rank,
        layers=decoder_layers(recipe),
        dtype=recipe.dtype,
        bandwidth_gb_s=machine.bytes_per_second / 1e9,
        gflop_s=machine.flop_per_second / 1e9,
        repeats=repeats,
        rows=tuple(rows),
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument(
        "--dtype", choices=TOLERANCE, help="default: the dtype that the base is served in"
    )
    add_count(parser, "--repeats", REPEATS, "runs of every operator on every batch")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and the plot, print the table."""
    recipe = load_recipe(arguments.model)
    dtype = arguments.dtype or recipe.serving_dtype
    if dtype not in TOLERANCE:
        problem = "the microbenchmark has no tolerance for the dtype that the base is served in"
        remedy = f"OPTIONS='--dtype NAME' with one of {', '.join(TOLERANCE)}"
        raise GuardError(problem, where=f"recipe {recipe.name}", got=dtype, remedy=remedy)
    report = run(recipe.model_copy(update={"dtype": dtype}), arguments.repeats)
    publish(report, arguments.runs / "sgmv_bench.json", table, draw)
