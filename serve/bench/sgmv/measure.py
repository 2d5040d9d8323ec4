"""Measures all operators on one batch, once their sums agree.

Knows nothing of tables, plots or kept reports.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tqdm import tqdm

from guard.errors import GuardError
from guard.recipe import Recipe
from serve.bench.report import Spread
from serve.bench.sgmv.batches import SgmvBatch
from serve.bench.sgmv.layers import LayerWork, work_of
from serve.bench.sgmv.machine import Machine
from serve.bench.sgmv.operators import operators
from serve.bench.sgmv.report import SgmvRow

if TYPE_CHECKING:
    import torch

    from serve.bench.sgmv.operators import Operator

BYTES = {"float32": 4, "bfloat16": 2}  # in a number
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # as a share of the largest sum


def measure(
    recipe: Recipe, batch: SgmvBatch, rank: int, machine: Machine, repeats: int, bar: tqdm
) -> list[SgmvRow]:
    """Measure all operators on one batch, interleaved. Raises GuardError if two disagree."""
    work = work_of(recipe, batch, rank)
    sides = 0  # inputs and outputs of all factors of rank 1
    for piece in work:
        sides += piece.layer.inputs * len(piece.layer.slices) + sum(piece.layer.slices)
    slots_read = {slot for slot, _ in batch.segments}
    ranks_read = sum(batch.ranks[slot] for slot in slots_read)
    bytes_read = BYTES[recipe.dtype] * ranks_read * sides
    flop = 0
    for slot, length in batch.segments:
        flop += 2 * length * batch.ranks[slot] * sides
    batch_operators = operators(batch)
    check(batch, batch_operators, work, TOLERANCE[recipe.dtype])
    return [
        SgmvRow(
            batch=batch.name,
            operator=name,
            ms=Spread.of([1000 * second for second in seconds]),
            lower_bound_ms=1000 * machine.lower_bound_s(bytes_read, flop),
            weights_mib=bytes_read / 2**20,
        )
        for name, seconds in _timed(batch_operators, work, repeats, bar).items()
    ]


def _timed(
    batch_operators: Mapping[str, Operator], work: Sequence[LayerWork], repeats: int, bar: tqdm
) -> dict[str, list[float]]:
    """The seconds of every repeat, by operator. Every repeat has another order of operators."""
    seconds: dict[str, list[float]] = {name: [] for name in batch_operators}
    for repeat in range(-1, repeats):  # the first is a warm-up
        for name in random.Random(repeat).sample(list(batch_operators), len(batch_operators)):
            started = time.perf_counter()
            for piece in work:
                batch_operators[name](piece.y, piece.x, piece.layer)
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - started)
        bar.update()
    return seconds


def check(
    batch: SgmvBatch,
    batch_operators: Mapping[str, Operator],
    work: Sequence[LayerWork],
    tolerance: float,
) -> None:
    """Compare the operators' sums.

    Raises GuardError if one differs by more than `tolerance` of the largest sum.
    """
    reference: list[torch.Tensor] = []
    for name, operator in batch_operators.items():
        sums = [_sum(operator, piece) for piece in work]
        reference = reference or sums
        for expected, actual in zip(reference, sums, strict=True):
            if (actual - expected).abs().max() > tolerance * expected.abs().max():
                problem, remedy = "two operators disagree", "Run the tests of serve/vllm_alora"
                raise GuardError(problem, where=batch.name, got=name, remedy=remedy)


def _sum(operator: Operator, work: LayerWork) -> torch.Tensor:
    work.y.zero_()
    operator(work.y, work.x, work.layer)
    return work.y.clone()
