"""The harness of all benchmarks: a grid of cells, measured in turns and tabled.

A benchmark is a subclass of `Benchmark` in a module of its own. It states its cells, what runs
while they are measured (`started`), one function that measures a cell once (`measure`), and its
columns. Importing the module must not import torch or vLLM: `--help` is answered first.

Cells that differ only in the field `line` are compared: they are measured in turns, another one
first in each repeat, so that a change of the machine's speed meets all of them. A coarse run
(--quick) has a report of its own, so that it replaces no full one.
"""

from __future__ import annotations

import argparse
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Generic, NamedTuple, TypeVar

from tqdm import tqdm

from guard.arguments import count
from guard.layout import Runs
from guard.recipe import load_recipe
from serve.bench.report import (
    Column,
    GridReport,
    MeasuredRow,
    Spread,
    Value,
    engine_settings,
    notes,
    origin,
    table,
    threads,
)

# Numbers that one measurement of a cell gives, by quantity; several numbers are pooled.
Sample = Mapping[str, float | Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell, measured `repeats` times. A subclass has a field for each thing its table names."""

    repeats: int = 1

    @property
    def work(self) -> float:
        """Of a repeat, relative to the other cells', for the progress bar."""
        return 1.0

    @property
    def values(self) -> dict[str, Value]:
        """What tells it from the other cells."""
        return {name: value for name, value in asdict(self).items() if name != "repeats"}

    @property
    def key(self) -> str:
        return json.dumps(self.values, sort_keys=True)


class Repeat(NamedTuple):
    """The number of a repeat, of how many, and a seed that compared cells have in common."""

    number: int
    of: int
    seed: int


@dataclass(frozen=True)
class Ratio:
    """A quantity of a cell over that of the compared cell `to`, within each repeat."""

    name: str
    quantity: str
    to: str


SomeCell = TypeVar("SomeCell", bound=Cell)


class BenchCommand(ABC):
    """What `python -m serve.bench NAME` runs: a grid, or what is none (`calibrate`).
    `summary` and `duration` (on two cores, with the tiny base) stand in the list.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    duration: ClassVar[str]

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.recipe = load_recipe(options.model)
        self.runs = Runs(options.runs)

    @classmethod  # noqa: B027  # most have none
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add its own options, if it has any, to those of all benchmarks."""

    @abstractmethod
    def main(self) -> None:
        """Measure, write the report, print it."""


class Benchmark(BenchCommand, Generic[SomeCell]):
    """A grid of cells."""

    columns: ClassVar[Sequence[Column]]
    line: ClassVar[str] = "method"
    ratios: ClassVar[Sequence[Ratio]] = ()
    repeats: ClassVar[int] = 3
    report_name: ClassVar[str] = ""  # of the report's file; by default NAME_bench

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        text = f"how often a cell is measured, at most (default: {cls.repeats})"
        parser.add_argument("--repeats", default=cls.repeats, type=count, help=text)

    @property
    def path(self) -> Path:
        """Where the report is kept."""
        name = self.report_name or f"{self.name}_bench"
        if self.options.quick:
            name += "_quick"
        return self.runs.root / f"{name}.json"

    @abstractmethod
    def cells(self) -> list[SomeCell]:
        """The cells, in the order of the table."""

    @abstractmethod
    def started(self, cells: Sequence[SomeCell]) -> AbstractContextManager[object]:
        """Run what the cells are measured on, warmed up."""

    @abstractmethod
    def measure(self, cell: SomeCell, repeat: Repeat) -> Sample:
        """Measure a cell once."""

    def notes(self, report: GridReport) -> list[str]:
        """Sentences below the table."""
        return []

    def main(self) -> None:
        """Measure all cells, and publish the report."""
        grid = _Grid(self)
        grid.measure()
        report = GridReport(
            **origin(self.recipe),
            benchmark=self.name,
            threads=threads(),
            engine=engine_settings(self.recipe),
            rows=tuple(grid.rows()),
        )
        self.publish(report)

    def publish(self, report: GridReport) -> None:
        """Write the report, and print the table."""
        report.save(self.path)
        print(table(report, self.columns))
        for line in notes(*self.notes(report)):
            print(line)
        print(f"peak memory: {report.peak_memory_mib:,.0f} MiB")
        print(f"written: {self.path}")


class _Grid(Generic[SomeCell]):
    """The measurement of a benchmark's cells."""

    def __init__(self, benchmark: Benchmark[SomeCell]) -> None:
        self._benchmark, self._cells = benchmark, benchmark.cells()
        self._samples: dict[SomeCell, list[Sample]] = {}

    def measure(self) -> None:
        total = sum(cell.work * cell.repeats for cell in self._cells)
        bar_format = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
        with (
            tqdm(total=total, desc=self._benchmark.name, bar_format=bar_format) as bar,
            self._benchmark.started(self._cells),
        ):
            for block in self._blocks():
                self._measure_block(block, bar)

    def rows(self) -> Iterator[MeasuredRow]:
        for cell in self._cells:
            samples = self._samples[cell]
            measured = _spreads(samples) | self._ratios(cell, samples)
            yield MeasuredRow(cell=cell.values, repeats=len(samples), measured=measured)

    def _blocks(self) -> list[list[SomeCell]]:
        """The cells, those together that are compared."""
        blocks: dict[str, list[SomeCell]] = {}
        for cell in self._cells:
            blocks.setdefault(self._block_key(cell), []).append(cell)
        return list(blocks.values())

    def _block_key(self, cell: SomeCell) -> str:
        values = cell.values
        values.pop(self._benchmark.line, None)
        return json.dumps(values, sort_keys=True)

    def _measure_block(self, cells: Sequence[SomeCell], bar: tqdm) -> None:
        repeats = max(cell.repeats for cell in cells)
        for number in range(repeats):
            due = [cell for cell in cells if number < cell.repeats]
            first = number % len(due)
            seed = zlib.crc32(f"{self._block_key(due[0])} {number}".encode())
            for cell in (*due[first:], *due[:first]):
                bar.set_postfix_str(", ".join(map(str, cell.values.values())), refresh=False)
                sample = self._benchmark.measure(cell, Repeat(number, repeats, seed))
                self._samples.setdefault(cell, []).append(sample)
                bar.update(cell.work)

    def _ratios(self, cell: SomeCell, samples: Sequence[Sample]) -> dict[str, Spread]:
        """The ratios to the cells that it is compared with, by name."""
        line, spreads = self._benchmark.line, dict[str, Spread]()
        by_key = {compared.key: of_compared for compared, of_compared in self._samples.items()}
        for ratio in self._benchmark.ratios:
            key = json.dumps(cell.values | {line: ratio.to}, sort_keys=True)
            if key in by_key and key != cell.key:
                pairs = zip(samples, by_key[key], strict=False)
                quantity = ratio.quantity
                shares = [number(own, quantity) / number(other, quantity) for own, other in pairs]
                spreads[ratio.name] = Spread.of(shares)
        return spreads


def number(sample: Sample, quantity: str) -> float:
    value = sample[quantity]
    assert isinstance(value, int | float)
    return value


def _spreads(samples: Sequence[Sample]) -> dict[str, Spread]:
    """The spread of every quantity over the repeats."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for quantity, value in sample.items():
            pooled = values.setdefault(quantity, [])
            if isinstance(value, int | float):
                pooled.append(value)
            else:
                pooled += value
    return {quantity: Spread.of(numbers) for quantity, numbers in values.items() if numbers}
