"""`make bench-sgmv`: the low-rank products of a step on the CPU, ours, vLLM's own and a plain loop over adapters. No engine, no model.

All three compute the same sums on the shapes of the base's layers: y += x A^T B^T for every token with its own adapter. The floor is the
time in which the machine reads the adapters' weights once, or that of the multiplications at the speed of a large matrix product, whichever
is longer.
"""

from __future__ import annotations

import argparse
import random
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from tqdm import tqdm

from guard.errors import GuardError, exits_cleanly
from guard.files.yaml_file import Strict
from guard.layout import Runs
from guard.provenance import peak_memory_mib, provenance
from guard.recipe import Recipe, load_recipe
from serve.bench.report import BenchReport, publish

if TYPE_CHECKING:
    import torch

    Operator = Callable[[torch.Tensor, torch.Tensor, "Layer"], None]

OPERATORS = ("grouped", "loop over adapters", "vLLM's operator")
COLOURS = ("#D55E00", "#0072B2", "#009E73")
REPEATS = 15
WIDTH = {"float32": 4, "bfloat16": 2}  # bytes
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # of the largest sum


@dataclass(frozen=True)
class Batch:
    """A step's segments: an adapter slot and a number of tokens each; and the ranks of the adapters in the slots."""

    name: str
    segments: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return sum(length for _, length in self.segments)


def batches(rank: int, suffix: int = 3) -> list[Batch]:
    """What steps of a fan-out and of a fleet look like; `rank` is the largest, `suffix` the tokens of a rule."""
    shuffled = random.Random(0).sample(range(100), 100)
    mixed = tuple((rank, rank // 2, rank // 4)[slot % 3] for slot in range(100))
    equal = (rank,) * 100
    lengths = random.Random(1).choices(range(15, 22), k=100)
    longs = random.Random(2).choices(range(180, 221), k=16)
    return [
        Batch(
            f"100 adapters x {suffix} tokens", tuple((slot, suffix) for slot in range(100)), equal
        ),
        Batch("the same, slots in any order", tuple((slot, suffix) for slot in shuffled), equal),
        Batch(
            f"the same, ranks {rank}, {rank // 2} and {rank // 4}",
            tuple((slot, suffix) for slot in shuffled),
            mixed,
        ),
        Batch("100 adapters x 15 to 21 tokens", tuple(zip(shuffled, lengths, strict=True)), equal),
        Batch(
            f"12 conversations x 20 adapters x {suffix} tokens",
            tuple((slot, suffix) for slot in shuffled[:20]) * 12,
            equal,
        ),
        Batch("1 adapter x 1,000 tokens", ((0, 1000),), equal),
        Batch(
            "4 LoRAs in turn, 16 x 180 to 220 tokens",
            tuple((number % 4, long) for number, long in enumerate(longs)),
            equal,
        ),
    ]


class SgmvRow(Strict):
    """One operator on one batch, all low-rank products of a step: medians over the repeats, in ms."""

    batch: str
    operator: str
    ms: float
    ms_min: float
    ms_max: float
    floor_ms: float
    weights_mib: float  # of the adapters, which have to be read once


class SgmvReport(BenchReport):
    """Everything in `runs/sgmv_bench.json`."""

    rank: int
    layers: int
    dtype: str
    bandwidth_gb_s: float  # of reading, and the rate of a large product: measured beside
    gflop_s: float
    repeats: int
    rows: tuple[SgmvRow, ...]


@dataclass(frozen=True)
class Layer:
    """A linear layer's adapters: A [slots, 1, rank, in] and B [slots, 1, out, rank] for each slice of its outputs."""

    inputs: int
    slices: tuple[int, ...]
    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]  # by columns, as the engine keeps them
    b_by_rows: tuple[torch.Tensor, ...]  # as vLLM does


def layers_of(recipe: Recipe, rank: int, ranks: Sequence[int], seed: int) -> list[Layer]:
    """One decoder layer's linear layers as vLLM packs them, with random adapters of these ranks, zero above each, of the recipe's type."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(recipe.base_path, revision=recipe.commit)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q, kv, hidden, wide = (
        config.num_attention_heads * head,
        config.num_key_value_heads * head,
        config.hidden_size,
        config.intermediate_size,
    )
    torch.manual_seed(seed)
    found = []
    for inputs, slices in (
        (hidden, (q, kv, kv)),
        (q, (hidden,)),
        (hidden, (wide, wide)),
        (wide, (hidden,)),
    ):
        a = tuple(torch.randn(len(ranks), 1, rank, inputs) / inputs**0.5 for _ in slices)
        b = tuple(torch.randn(len(ranks), 1, rank, outputs).mT for outputs in slices)
        for slot, its_rank in enumerate(ranks):
            for one, other in zip(a, b, strict=True):
                one[slot, :, its_rank:] = 0
                other[slot, :, :, its_rank:] = 0
        dtype = getattr(torch, recipe.dtype)
        a, b = (
            tuple(part.to(dtype) for part in a),
            tuple(part.mT.contiguous().to(dtype).mT for part in b),
        )
        found.append(Layer(inputs, slices, a, b, tuple(part.contiguous() for part in b)))
    return found


def operators(batch: Batch, max_batches: int = 1024) -> dict[str, Operator]:
    """The three ways to compute a batch."""
    import vllm_alora
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm_alora.sgmv import Kind

    vllm_alora.register()
    slots = len(batch.ranks)
    tokens = tuple(slot + 1 for slot, length in batch.segments for _ in range(length))
    wrapper: Any = PunicaWrapperCPU(len(tokens), max_batches=max_batches, device="cpu")
    wrapper.slot_kinds = [Kind(rank) for rank in batch.ranks]
    wrapper.update_metadata(
        LoRAMapping(tokens, (0,), is_prefill=True),
        [slot + 1 for slot in range(slots)],
        slots + 1,
        100,
    )
    stock = PunicaWrapperCPU.add_lora_linear.__wrapped__  # type: ignore[attr-defined]
    of_slot: dict[int, list[int]] = {}
    for place, token in enumerate(tokens):
        of_slot.setdefault(token - 1, []).append(place)
    places = {slot: _rows(found) for slot, found in of_slot.items()}

    def grouped(y: torch.Tensor, x: torch.Tensor, layer: Layer) -> None:
        wrapper.add_lora_linear(y, x, layer.a, layer.b, 1.0, layer.slices)

    def loop(y: torch.Tensor, x: torch.Tensor, layer: Layer) -> None:
        for a, b, part in zip(layer.a, layer.b, y.split(layer.slices, dim=-1), strict=True):
            for slot, rows in places.items():
                rank = batch.ranks[slot]
                down, up = a[slot, 0, :rank].T, b[slot, 0, :, :rank].T
                if isinstance(rows, slice):
                    part[rows].addmm_(x[rows] @ down, up)
                else:
                    part.index_add_(0, rows, x.index_select(0, rows) @ down @ up)

    def vllms(y: torch.Tensor, x: torch.Tensor, layer: Layer) -> None:
        stock(wrapper, y, x, layer.a, layer.b_by_rows, 1.0, layer.slices)

    return dict(zip(OPERATORS, (grouped, loop, vllms), strict=True))


def _rows(places: Sequence[int]) -> slice | torch.Tensor:
    """An adapter's tokens: a slice where they follow one another, as in a fan-out."""
    import torch

    first, last = places[0], places[-1]
    return slice(first, last + 1) if last - first + 1 == len(places) else torch.tensor(places)


def run(recipe: Recipe, repeats: int = REPEATS) -> SgmvReport:
    """Measure every operator on every batch, in turns. Raises GuardError if two disagree."""
    from transformers import AutoConfig

    rank = recipe.methods["alora"].lora["r"]
    depth = AutoConfig.from_pretrained(recipe.base_path, revision=recipe.commit).num_hidden_layers
    bandwidth, rate = _bandwidth(), _rate(recipe.dtype)
    rows = []
    with tqdm(total=len(batches(rank)) * (repeats + 1), desc="measuring", unit="step") as bar:
        for batch in batches(rank):
            layers = [
                layer
                for seed in range(depth)
                for layer in layers_of(recipe, rank, batch.ranks, seed)
            ]
            sides = sum(layer.inputs * len(layer.slices) + sum(layer.slices) for layer in layers)
            weights = sum(
                WIDTH[recipe.dtype] * batch.ranks[slot] * sides
                for slot in {slot for slot, _ in batch.segments}
            )
            products = sum(
                2 * length * batch.ranks[slot] * sides for slot, length in batch.segments
            )
            found = operators(batch)
            work = _work(layers, batch.tokens)
            _check(batch, found, work, TOLERANCE[recipe.dtype])
            seconds: dict[str, list[float]] = {name: [] for name in found}
            for repeat in range(-1, repeats):  # the first is a warm-up
                for name in random.Random(repeat).sample(list(found), len(found)):
                    started = time.perf_counter()
                    for each in work:
                        found[name](each.y, each.x, each.layer)
                    if repeat >= 0:
                        seconds[name].append(time.perf_counter() - started)
                bar.update()
            floor_ms = 1000 * max(weights / bandwidth, products / rate)
            rows += [
                SgmvRow(
                    batch=batch.name,
                    operator=name,
                    ms=1000 * statistics.median(each),
                    ms_min=1000 * min(each),
                    ms_max=1000 * max(each),
                    floor_ms=floor_ms,
                    weights_mib=weights / 2**20,
                )
                for name, each in seconds.items()
            ]
    return SgmvReport(
        **provenance(),
        model=recipe.name,
        peak_memory_mib=peak_memory_mib(),
        rank=rank,
        layers=depth,
        dtype=recipe.dtype,
        bandwidth_gb_s=bandwidth / 1e9,
        gflop_s=rate / 1e9,
        repeats=repeats,
        rows=tuple(rows),
    )


@dataclass(frozen=True)
class Work:
    """A layer's tokens: x [tokens, in], and y [tokens, out], to which the products are added."""

    layer: Layer
    x: torch.Tensor
    y: torch.Tensor


def _work(layers: Sequence[Layer], tokens: int) -> list[Work]:
    import torch

    return [
        Work(
            layer,
            torch.randn(tokens, layer.inputs).to(layer.a[0].dtype),
            torch.zeros(tokens, sum(layer.slices)).to(layer.a[0].dtype),
        )
        for layer in layers
    ]


def _check(
    batch: Batch, found: dict[str, Operator], work: Sequence[Work], tolerance: float
) -> None:
    sums = {}
    for name, operator in found.items():
        for each in work:
            each.y.zero_()
            operator(each.y, each.x, each.layer)
        sums[name] = [each.y.clone() for each in work]
    expected, *others = sums.items()
    for name, its_sums in others:
        for mine, wanted in zip(its_sums, expected[1], strict=True):
            if (mine - wanted).abs().max() > tolerance * wanted.abs().max():
                raise GuardError(
                    "two operators disagree",
                    where=batch.name,
                    got=name,
                    remedy="Run the tests of serve/vllm_alora",
                )


def _bandwidth() -> float:
    """Bytes that the machine reads in a second, with all its threads."""
    import torch

    numbers = torch.ones(2**27)  # 512 MiB: beyond any cache
    numbers.sum()
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        numbers.sum()
        taken.append(time.perf_counter() - started)
    return 4 * len(numbers) / statistics.median(taken)


def _rate(dtype: str) -> float:
    """Floating-point operations a second of a large matrix product, with all threads: by MKL or oneDNN, whichever is faster here."""
    import torch

    one = torch.ones(2048, 2048, dtype=getattr(torch, dtype))
    packed = one.to_mkldnn()
    medians = []
    for product in (lambda: one @ one, lambda: torch.nn.functional.linear(packed, packed)):
        taken = []
        for _ in range(6):
            started = time.perf_counter()
            product()
            taken.append(time.perf_counter() - started)
        medians.append(statistics.median(taken[1:]))
    return 2 * len(one) ** 3 / min(medians)


def table(report: SgmvReport) -> str:
    """The report as text."""
    width = max(len(row.batch) for row in report.rows)
    head = f"{'batch':<{width}} | {'operator':<18} | {'ms a step (min to max)':>26} | {'of the floor':>12} | {'weights, MiB':>12}"
    lines = [head, "-" * len(head)]
    for row in report.rows:
        name = row.batch if row.operator == OPERATORS[0] else ""
        wall = f"{row.ms:.1f} ({row.ms_min:.1f} to {row.ms_max:.1f})"
        lines.append(
            f"{name:<{width}} | {row.operator:<18} | {wall:>26} | {row.ms / row.floor_ms:>11.1f}x | {row.weights_mib:>12.1f}"
        )
    return "\n".join([*lines, caption(report)])


def caption(report: SgmvReport) -> str:
    """Where the numbers come from, in one line."""
    return (
        f"All low-rank products of a step of {report.model}, {report.layers} layers, adapters with weights in every linear one, rank "
        f"{report.rank}, {report.dtype}; floor: reading the adapters' weights once at {report.bandwidth_gb_s:.0f} GB/s, or multiplying at "
        f"{report.gflop_s:.0f} GFLOP/s; {report.hardware}; commit {report.commit}; median of {report.repeats}."
    )


def draw(report: SgmvReport, path: Path) -> None:
    """Write the plot: a group of bars for each batch."""
    names = list(dict.fromkeys(row.batch for row in report.rows))
    figure = Figure(figsize=(8, 0.9 * len(names) + 1.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for place, (operator, colour) in enumerate(zip(OPERATORS, COLOURS, strict=True)):
        rows = [row for row in report.rows if row.operator == operator]
        axes.barh(
            [index + 0.25 * (place - 1) for index in range(len(rows))],
            [row.ms for row in rows],
            0.25,
            color=colour,
            label=operator,
        )
    floors = [next(row.floor_ms for row in report.rows if row.batch == name) for name in names]
    axes.plot(floors, range(len(names)), "k|", markersize=24, label="floor")
    axes.set_yticks(range(len(names)), [textwrap.fill(name, 30) for name in names])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms a step")
    axes.grid(axis="x", linewidth=0.4, alpha=0.6)
    axes.legend()
    figure.supxlabel("\n".join(textwrap.wrap(caption(report), 120)), fontsize=7, color="#444444")
    figure.savefig(path)


@exits_cleanly
def main() -> None:
    """Measure, write the report and the plot, print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m serve.bench.sgmv",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="tiny", help="a base model of recipes/models (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=TOLERANCE, help="default: the recipe's")
    parser.add_argument(
        "--runs", type=Path, default=Runs().root, help="where the results go (default: %(default)s)"
    )
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.model)
    report = run(recipe.model_copy(update={"dtype": arguments.dtype or recipe.dtype}))
    publish(report, arguments.runs / "sgmv_bench.json", draw, table)


if __name__ == "__main__":
    main()
