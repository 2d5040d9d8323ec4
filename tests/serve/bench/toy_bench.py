"""A benchmark whose samples are made up, and benchmarks on small engines. Tests only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest import MonkeyPatch

from guard.recipe import Recipe
from serve.bench.__main__ import bench_named, parser_of
from serve.bench.harness import Benchmark, Cell, Ratio, Repeat, Sample
from serve.bench.report import Column, GridReport
from tests.serve.bench.small_engine import small_recipe


@dataclass(frozen=True, kw_only=True)
class ToyCell(Cell):
    """A toy server at a size."""

    size: int
    server: str


class ToyBench(Benchmark[ToyCell]):
    """Two servers, of which the fast one takes a millisecond a size and the slow one three."""

    name = "toy"
    summary = "a toy"
    duration = "no time"
    line = "server"
    repeats = 2
    columns = (
        Column("size", "size"),
        Column("", "server"),
        Column("ms", "wall_ms", 1, "spread"),
        Column("p95", "request_ms", part="p95"),
        Column("/fast", "over_fast", 1, unit="x"),
    )
    ratios = (Ratio("over_fast", "wall_ms", "fast"),)
    log: list[Any]  # the cells that were started, and what was measured
    on_measure: Callable[[ToyCell, Repeat], None]

    def cells(self) -> list[ToyCell]:
        cells: list[ToyCell] = []
        for size in (1, 2, 10):
            for server, repeats in (("slow", 1), ("fast", self.options.repeats)):
                cells.append(ToyCell(size=size, server=server, repeats=repeats))
        return cells

    @contextlib.contextmanager
    def started(self, cells: Sequence[ToyCell]) -> Iterator[None]:
        self.log.append([cell.size for cell in cells])
        yield

    def measure(self, cell: ToyCell, repeat: Repeat) -> Sample:
        self.on_measure(cell, repeat)
        self.log.append((cell.size, cell.server, repeat.number))
        wall_ms = float(cell.size + repeat.number)
        if cell.server == "slow":
            wall_ms *= 3
        return {"wall_ms": wall_ms, "request_ms": [wall_ms] * 20}

    def notes(self, report: GridReport) -> list[str]:
        return ["A note."]


def toy_bench(runs: Path, *words: str) -> ToyBench:
    """A toy whose results go to `runs`."""
    bench = ToyBench(parser_of(ToyBench).parse_args(["--runs", str(runs), *words]))
    bench.log, bench.on_measure = [], lambda *_: None
    return bench


def bench_on(name: str, runs: Path, *words: str, recipe: Recipe | None = None) -> Any:
    """A benchmark with these options, on a small engine unless another recipe is given."""
    kind = bench_named(name)
    with MonkeyPatch.context() as patch:
        patch.setattr("serve.bench.harness.load_recipe", lambda _: recipe or small_recipe())
        return kind(parser_of(kind).parse_args(["--runs", str(runs), *words]))


def reported(path: Path) -> GridReport:
    return GridReport.model_validate_json(path.read_text())
