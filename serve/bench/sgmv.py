"""SGMV microbenchmark.

The low-rank products of a step on the CPU, ours, vLLM's own and a plain loop over adapters. No
engine, no model.

All three compute the same sums on the shapes of the base's layers: y += x A^T B^T for every token
with its own adapter. The lower bound is a roofline: the time in which the machine reads the
adapters' weights once, or that of the multiplications at the rate of a large matrix product,
whichever is longer.
"""

from __future__ import annotations

import argparse
import random
import statistics
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from guard.errors import GuardError
from guard.files.yaml_file import Strict
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count
from serve.bench.plot import BLUE, GREEN, VERMILION, new_figure, save_figure
from serve.bench.report import BenchReport, Spread, origin, publish

if TYPE_CHECKING:
    import torch

    Operator = Callable[[torch.Tensor, torch.Tensor, "Layer"], None]

OURS, LOOP, VLLMS = "ours", "loop over adapters", "vLLM's operator"
OPERATORS = {OURS: VERMILION, LOOP: BLUE, VLLMS: GREEN}
REPEATS = 15
BYTES = {"float32": 4, "bfloat16": 2}  # of a number
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # of the largest sum
BANDWIDTH_NUMBERS = 2**27  # 512 MiB: beyond any cache
GEMM_SIZE = 2048
PEFT_RANK = 8  # of a LoRA whose recipe states none


@dataclass(frozen=True)
class SgmvBatch:
    """A step's segments, an adapter slot and a number of tokens each, and the ranks of the adapters
    in the slots.
    """

    name: str
    segments: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return sum(length for _, length in self.segments)

    @property
    def slot_of_token(self) -> list[int]:
        """The adapter slot of every token."""
        slots: list[int] = []
        for slot, length in self.segments:
            slots += [slot] * length
        return slots


def batches(rank: int, suffix: int = 3) -> list[SgmvBatch]:
    """What steps of a fan-out and of a fleet look like.

    `rank` is the largest, `suffix` the tokens of a rule.
    """
    slots = random.Random(0).sample(range(100), 100)
    lengths = random.Random(1).choices(range(15, 22), k=100)
    long_lengths = random.Random(2).choices(range(180, 221), k=16)
    mixed = tuple((rank, rank // 2, rank // 4)[slot % 3] for slot in range(100))
    in_order = tuple((slot, suffix) for slot in range(100))
    shuffled = tuple((slot, suffix) for slot in slots)
    loras = tuple((number % 4, length) for number, length in enumerate(long_lengths))
    mixed_name = f"the same, ranks {rank}, {rank // 2} and {rank // 4}"
    equal = (rank,) * 100
    return [
        SgmvBatch(f"100 adapters x {suffix} tokens", in_order, equal),
        SgmvBatch("the same, slots in any order", shuffled, equal),
        SgmvBatch(mixed_name, shuffled, mixed),
        SgmvBatch("100 adapters x 15 to 21 tokens", tuple(zip(slots, lengths, strict=True)), equal),
        SgmvBatch(f"12 conversations x 20 adapters x {suffix} tokens", shuffled[:20] * 12, equal),
        SgmvBatch("1 adapter x 1,000 tokens", ((0, 1000),), equal),
        SgmvBatch("4 LoRAs, round-robin, 16 x 180 to 220 tokens", loras, equal),
    ]


class SgmvRow(Strict):
    """One operator on one batch: all low-rank products of a step, times in ms."""

    batch: str
    operator: str
    ms: Spread
    lower_bound_ms: float
    weights_mib: float  # of the adapters, which have to be read once


class SgmvReport(BenchReport):
    """Everything in `runs/sgmv_bench.json`.

    `bandwidth_gb_s` of reading, `gflop_s` of a large product: measured beside.
    """

    rank: int
    layers: int
    dtype: str
    bandwidth_gb_s: float
    gflop_s: float
    repeats: int
    rows: tuple[SgmvRow, ...]


@dataclass(frozen=True)
class Layer:
    """A linear layer's adapters.

    A [slots, 1, rank, in] and B [slots, 1, out, rank] for each slice of its outputs.
    """

    inputs: int
    slices: tuple[int, ...]
    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]  # by columns, as the engine keeps them
    b_by_rows: tuple[torch.Tensor, ...]  # as vLLM does


def layers_of(recipe: Recipe, rank: int, ranks: Sequence[int], seed: int) -> list[Layer]:
    """One decoder layer's linear layers as vLLM packs them, with random adapters of these ranks,
    zero above each, of the recipe's type.
    """
    import torch

    torch.manual_seed(seed)
    layers = []
    for inputs, slices in _shapes(recipe):
        a = [torch.randn(len(ranks), 1, rank, inputs) / inputs**0.5 for _ in slices]
        b = [torch.randn(len(ranks), 1, rank, outputs) for outputs in slices]
        for number in range(len(slices)):
            _zero_above_rank(a[number], ranks)
            _zero_above_rank(b[number], ranks)
        dtype = getattr(torch, recipe.dtype)
        by_columns = tuple(part.contiguous().to(dtype).mT for part in b)
        by_rows = tuple(part.contiguous() for part in by_columns)
        layers.append(
            Layer(inputs, slices, tuple(part.to(dtype) for part in a), by_columns, by_rows)
        )
    return layers


def _shapes(recipe: Recipe) -> list[tuple[int, tuple[int, ...]]]:
    """Inputs and slices of outputs of the linear layers of a decoder layer.

    QKV, O, gate and up, down.
    """
    config = _config(recipe)
    heads, hidden, wide = config.num_attention_heads, config.hidden_size, config.intermediate_size
    head_size = getattr(config, "head_dim", None) or hidden // heads
    q, kv = heads * head_size, config.num_key_value_heads * head_size
    return [(hidden, (q, kv, kv)), (q, (hidden,)), (hidden, (wide, wide)), (wide, (hidden,))]


def _zero_above_rank(weights: torch.Tensor, ranks: Sequence[int]) -> None:
    """Zero the rows [slots, 1, rank, …] of each slot beyond its adapter's rank."""
    for slot, rank in enumerate(ranks):
        weights[slot, :, rank:] = 0


def _config(recipe: Recipe) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(recipe.base_path, revision=recipe.commit)


def operators(batch: SgmvBatch, max_batches: int = 1024) -> dict[str, Operator]:
    """The three ways to compute a batch."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm_alora.low_rank.sgmv import know_layer

    wrapper = _wrapper(batch, max_batches)
    stock = PunicaWrapperCPU.add_lora_linear.__wrapped__  # type: ignore[attr-defined]
    rows_of_slot = _rows_of_slots(batch)

    prepared: set[int] = set()

    def ours(y: torch.Tensor, x: torch.Tensor, layer: Layer) -> None:
        if id(layer) not in prepared:  # in the comparison, before anything is timed
            know_layer(wrapper, layer.a, layer.b).ranks[:] = batch.ranks
            prepared.add(id(layer))
        wrapper.add_lora_linear(y, x, layer.a, layer.b, 1.0, layer.slices)

    def loop(y: torch.Tensor, x: torch.Tensor, layer: Layer) -> None:
        for a, b, part in zip(layer.a, layer.b, y.split(layer.slices, dim=-1), strict=True):
            for slot, rows in rows_of_slot.items():
                rank = batch.ranks[slot]
                down, up = a[slot, 0, :rank].T, b[slot, 0, :, :rank].T
                if isinstance(rows, slice):
                    part[rows].addmm_(x[rows] @ down, up)
                else:
                    part.index_add_(0, rows, x.index_select(0, rows) @ down @ up)

    def vllms(y: torch.Tensor, x: torch.Tensor, layer: Layer) -> None:
        stock(wrapper, y, x, layer.a, layer.b_by_rows, 1.0, layer.slices)

    return {OURS: ours, LOOP: loop, VLLMS: vllms}


def _wrapper(batch: SgmvBatch, max_batches: int) -> Any:
    """vLLM's entry to the products, patched by the plugin; the batch's tokens have slots."""
    import torch
    import vllm_alora
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm_alora.low_rank.sgmv import is_native

    vllm_alora.register()
    slots = len(batch.ranks)
    wrapper: Any = PunicaWrapperCPU(batch.tokens, max_batches=max_batches, device="cpu")
    wrapper.native = is_native(torch.float32)
    mapping = LoRAMapping(tuple(slot + 1 for slot in batch.slot_of_token), (0,), is_prefill=True)
    wrapper.update_metadata(mapping, [slot + 1 for slot in range(slots)], slots + 1, 100)
    return wrapper


def _rows_of_slots(batch: SgmvBatch) -> dict[int, slice | torch.Tensor]:
    """Each adapter's tokens: a slice where they follow one another, as in a fan-out."""
    import torch

    tokens_of_slot: dict[int, list[int]] = {}
    for token, slot in enumerate(batch.slot_of_token):
        tokens_of_slot.setdefault(slot, []).append(token)
    rows: dict[int, slice | torch.Tensor] = {}
    for slot, tokens in tokens_of_slot.items():
        if tokens[-1] - tokens[0] + 1 == len(tokens):
            rows[slot] = slice(tokens[0], tokens[-1] + 1)
        else:
            rows[slot] = torch.tensor(tokens)
    return rows


@dataclass(frozen=True)
class LayerWork:
    """A layer's tokens: x [tokens, in], and y [tokens, out], to which the products are added."""

    layer: Layer
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Machine:
    """What the machine reaches with all its threads.

    Bytes read, and floating-point operations, a second.
    """

    bytes_per_second: float
    flop_per_second: float

    def lower_bound_s(self, bytes_read: float, flop: float) -> float:
        """The roofline: no faster than reading so many bytes and computing so many products."""
        return max(bytes_read / self.bytes_per_second, flop / self.flop_per_second)


def run(
    recipe: Recipe,
    repeats: int = REPEATS,
    make_batches: Callable[[int], Sequence[SgmvBatch]] = batches,
    machine: Machine | None = None,
) -> SgmvReport:
    """Measure every operator on every batch, interleaved. Raises GuardError if two disagree.

    `machine`: what it reaches, if that was measured already.
    """
    rank: int = recipe.methods[recipe.sharing_method].lora.get("r", PEFT_RANK)
    machine = machine or Machine(_bytes_per_second(), _flop_per_second(recipe.dtype))
    chosen = make_batches(rank)
    rows: list[SgmvRow] = []
    with tqdm(total=len(chosen) * (repeats + 1), desc="measuring", unit="step") as bar:
        for batch in chosen:
            rows += _rows(recipe, batch, rank, machine, repeats, bar)
    return SgmvReport(
        **origin(recipe),
        rank=rank,
        layers=_config(recipe).num_hidden_layers,
        dtype=recipe.dtype,
        bandwidth_gb_s=machine.bytes_per_second / 1e9,
        gflop_s=machine.flop_per_second / 1e9,
        repeats=repeats,
        rows=tuple(rows),
    )


def _rows(
    recipe: Recipe, batch: SgmvBatch, rank: int, machine: Machine, repeats: int, bar: tqdm
) -> list[SgmvRow]:
    """All operators on one batch."""
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
    of_batch = operators(batch)
    check(batch, of_batch, work, TOLERANCE[recipe.dtype])
    return [
        SgmvRow(
            batch=batch.name,
            operator=name,
            ms=Spread.of([1000 * second for second in seconds]),
            lower_bound_ms=1000 * machine.lower_bound_s(bytes_read, flop),
            weights_mib=bytes_read / 2**20,
        )
        for name, seconds in _timed(of_batch, work, repeats, bar).items()
    ]


def work_of(recipe: Recipe, batch: SgmvBatch, rank: int) -> list[LayerWork]:
    """All linear layers of the base, each with random tokens."""
    import torch

    dtype, work = getattr(torch, recipe.dtype), []
    layers: list[Layer] = []
    for seed in range(_config(recipe).num_hidden_layers):
        layers += layers_of(recipe, rank, batch.ranks, seed)
    for layer in layers:
        x = torch.randn(batch.tokens, layer.inputs).to(dtype)
        work.append(LayerWork(layer, x, torch.zeros(batch.tokens, sum(layer.slices)).to(dtype)))
    return work


def _timed(
    of_batch: Mapping[str, Operator], work: Sequence[LayerWork], repeats: int, bar: tqdm
) -> dict[str, list[float]]:
    """Seconds of every repeat, by operator; the operators in another order in every repeat."""
    seconds: dict[str, list[float]] = {name: [] for name in of_batch}
    for repeat in range(-1, repeats):  # the first is a warm-up
        for name in random.Random(repeat).sample(list(of_batch), len(of_batch)):
            started = time.perf_counter()
            for piece in work:
                of_batch[name](piece.y, piece.x, piece.layer)
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - started)
        bar.update()
    return seconds


def check(
    batch: SgmvBatch,
    of_batch: Mapping[str, Operator],
    work: Sequence[LayerWork],
    tolerance: float,
) -> None:
    """Compare the operators' sums.

    Raises GuardError if one differs by more than `tolerance` of the largest sum.
    """
    reference: list[torch.Tensor] = []
    for name, operator in of_batch.items():
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


def _bytes_per_second() -> float:
    """What the machine reads with all its threads."""
    import torch

    numbers = torch.ones(BANDWIDTH_NUMBERS)
    numbers.sum()
    return 4 * len(numbers) / _median_seconds(lambda: numbers.sum(), 5)


def _flop_per_second(dtype: str) -> float:
    """Of a large matrix product, with all threads: by MKL or oneDNN, whichever is faster here."""
    import torch

    matrix = torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=getattr(torch, dtype))
    packed = matrix.to_mkldnn()
    products = (lambda: matrix @ matrix, lambda: torch.nn.functional.linear(packed, packed))
    medians = []
    for product in products:
        product()
        medians.append(_median_seconds(product, 5))
    return 2 * GEMM_SIZE**3 / min(medians)


def _median_seconds(action: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def table(report: SgmvReport) -> str:
    """The report as text."""
    width = max(len(row.batch) for row in report.rows)
    head = (
        f"{'batch':<{width}} | {'operator':<18} | {'ms a step (min to max)':>26} | "
        f"{'of lower bound':>14} | {'weights, MiB':>12}"
    )
    lines = [head, "-" * len(head)]
    previous = ""
    for row in report.rows:
        name = row.batch.removeprefix(previous)  # once a batch
        previous = row.batch
        lines.append(
            f"{name:<{width}} | {row.operator:<18} | {row.ms.text(1):>26} | "
            f"{row.ms.median / row.lower_bound_ms:>13.1f}x | {row.weights_mib:>12.1f}"
        )
    return "\n".join([*lines, caption(report)])


def caption(report: SgmvReport) -> str:
    """Where the numbers come from, in one line."""
    return (
        f"All low-rank products of a step of {report.model}, {report.layers} layers, adapters with "
        f"weights in every linear one, rank {report.rank}, {report.dtype}; lower bound (roofline): "
        f"reading the adapters' weights once at {report.bandwidth_gb_s:.0f} GB/s, or multiplying "
        f"at {report.gflop_s:.0f} GFLOP/s; {report.hardware}; commit {report.commit}; "
        f"median of {report.repeats}."
    )


def draw(report: SgmvReport, path: Path) -> None:
    """Write the plot: a group of bars for each batch."""
    bounds = {row.batch: row.lower_bound_ms for row in report.rows}
    figure = new_figure(8, 0.9 * len(bounds) + 1.8)
    axes = figure.add_subplot()
    for number, (operator, colour) in enumerate(OPERATORS.items()):
        medians = [row.ms.median for row in report.rows if row.operator == operator]
        y = [index + 0.25 * (number - 1) for index in range(len(medians))]
        axes.barh(y, medians, 0.25, color=colour, label=operator)
    y = list(range(len(bounds)))
    axes.plot(list(bounds.values()), y, "k|", markersize=24, label="lower bound")
    axes.set_yticks(y, [textwrap.fill(name, 30) for name in bounds])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms a step")
    axes.grid(axis="x", linewidth=0.4, alpha=0.6)
    axes.legend()
    save_figure(figure, caption(report), path)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument(
        "--dtype", choices=TOLERANCE, help="default: the one that the base is served in"
    )
    add_count(parser, "--repeats", REPEATS, "runs of every operator on every batch")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and the plot, print the table."""
    recipe = load_recipe(arguments.model)
    dtype = arguments.dtype or recipe.serving_dtype
    report = run(recipe.model_copy(update={"dtype": dtype}), arguments.repeats)
    publish(report, arguments.runs / "sgmv_bench.json", table, draw)
