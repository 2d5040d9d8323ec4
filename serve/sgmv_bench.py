"""What the adapters cost on top of one linear layer on this CPU: vLLM's operator against runs of tokens. JSON on stdout.

`python -m serve.sgmv_bench` decides how `vllm_alora.sgmv` multiplies; run it again when vLLM or the hardware changes.
CPU time of one thread, best of several, in ms: comparable on a machine that is busy with other things.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tqdm import tqdm

from guard.errors import exits_cleanly

if TYPE_CHECKING:
    import torch

SHAPES = [(384, 384), (384, 1024), (1024, 3072)]  # in, out
BATCHES = [(100, 25), (100, 1), (32, 250)]  # segments, tokens of each
STOCK_LIMIT = 2**27  # elements of the gathered matrices above which vLLM's operator is left out: it would take the memory


@dataclass(frozen=True)
class Cell:
    """One layer and one batch. `runs_ms` is segment by segment, `views_ms` one run of all segments (equal lengths only)."""

    dtype: str
    inputs: int
    outputs: int
    segments: int
    tokens: int
    rank: int
    base_ms: float
    stock_ms: float | None
    runs_ms: float
    views_ms: float


def measure(dtype: torch.dtype, inputs: int, outputs: int, segments: int, length: int, rank: int, repeats: int) -> Cell:
    """Time one layer with `segments` adapters, each on `length` tokens."""
    import torch
    from vllm.lora.ops.torch_ops import bgmv_expand, bgmv_shrink
    from vllm_alora.sgmv import Run, add_low_rank

    tokens = segments * length
    x, y, weight = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, outputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    a, b = torch.randn(segments, rank, inputs).to(dtype), torch.randn(segments, outputs, rank).to(dtype)
    slots = torch.arange(segments).repeat_interleave(length)

    def stock() -> None:
        low_rank = torch.zeros(tokens, rank)
        bgmv_shrink(x, a, low_rank, slots)
        bgmv_expand(low_rank, b, y, slots)

    def runs() -> None:
        for segment in range(segments):
            add_low_rank(y, x, a, b, Run(segment * length, length, segment), rank)

    def views() -> None:
        add_low_rank(y, x, a, b, Run(0, length, 0, lanes=segments), rank)

    def base() -> None:
        torch.nn.functional.linear(x, weight)

    fits = tokens * rank * max(inputs, outputs) < STOCK_LIMIT
    times = {
        "base_ms": best_ms(base, repeats),
        "stock_ms": best_ms(stock, repeats) if fits else None,
        "runs_ms": best_ms(runs, repeats),
        "views_ms": best_ms(views, repeats),
    }
    return Cell(str(dtype).removeprefix("torch."), inputs, outputs, segments, tokens, rank, **times)  # type: ignore[arg-type]


def best_ms(work: Callable[[], None], repeats: int) -> float:
    """The least CPU time of `work` in this thread, in ms, after one call to warm up."""
    work()
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return round(min(times) * 1000, 3)


@exits_cleanly
def main() -> None:
    """Measure every cell and print them with versions and hardware."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="timings per cell, of which the best counts (default: 9)")
    repeats = parser.parse_args().repeats
    import torch
    import vllm

    torch.set_num_threads(1)
    grid = list(itertools.product((torch.float32, torch.bfloat16), SHAPES, BATCHES, (16, 32)))
    cells = [
        asdict(measure(dtype, inputs, outputs, segments, length, rank, repeats))
        for dtype, (inputs, outputs), (segments, length), rank in tqdm(grid, unit="cell")
    ]
    hardware = {"machine": platform.machine(), "cpu": torch.backends.cpu.get_cpu_capability()}
    print(json.dumps({"hardware": hardware, "versions": {"torch": torch.__version__, "vllm": vllm.__version__}, "cells": cells}, indent=1))


if __name__ == "__main__":
    main()
