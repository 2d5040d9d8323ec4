"""What every benchmark's report has: where its numbers come from, its rows, and its table. Knows
nothing of what was measured.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict
from guard.machine.device import usable_cores
from guard.machine.provenance import Provenance, peak_memory_mib, provenance
from guard.method import METHODS
from guard.recipe import Recipe

NOTE_COLUMNS = 110
# Of fewer values, less than one in the mean is above the percentile.
FEWEST_FOR_P95, FEWEST_FOR_P99 = 20, 100

Value = str | int | float | None


class Spread(Strict):
    """A quantity that was measured several times. A percentile of too few values is None."""

    median: float
    min: float
    max: float
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of at least one value."""
        spread = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        if len(values) >= FEWEST_FOR_P95:
            spread["p95"] = percentile(values, 95)
        if len(values) >= FEWEST_FOR_P99:
            spread["p99"] = percentile(values, 99)
        return cls(**{name: float(value) for name, value in spread.items()})

    def text(self, digits: int = 0, unit: str = "") -> str:
        """The spread as text: `157 (150 to 162)`, or with a unit `1.06x (1.00 to 1.21)`."""
        low, high = f"{self.min:,.{digits}f}", f"{self.max:,.{digits}f}"
        return f"{self.median:,.{digits}f}{unit} ({low} to {high})"


class MeasuredRow(Strict):
    """A cell of the grid, and the spread of every quantity that was measured of it."""

    cell: dict[str, Value]
    repeats: int
    measured: dict[str, Spread]

    def median(self, quantity: str) -> float:
        """The median of a quantity. Raises KeyError where it was not measured."""
        return self.measured[quantity].median


class BenchReport(Strict):
    """A JSON file of measurements."""

    commit: str
    hardware: str
    versions: dict[str, str]
    model: str
    peak_memory_mib: float  # resident, of the process that measured

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps(self.model_dump(mode="json"), indent=1)
        with atomic_write(path) as part:
            part.write_text(content + "\n", encoding="utf-8")

    @property
    def source(self) -> str:
        """Where the numbers come from, for a caption: `tiny on AMD EPYC, …; commit 1a2b3c4`."""
        return f"{self.model} on {self.hardware}; commit {self.commit}"


class GridReport(BenchReport):
    """The report of a grid of cells."""

    benchmark: str
    threads: int  # of an engine
    engine: dict[str, str]  # the recipe's arguments
    rows: tuple[MeasuredRow, ...]

    @property
    def caption(self) -> str:
        """Where the numbers come from, in one line."""
        repeats = sorted({row.repeats for row in self.rows})
        counts = f"{repeats[0]} to {repeats[-1]}"
        if len(repeats) == 1:
            counts = str(repeats[0])
        versions = [f"{name} {self.versions[name]}" for name in ("vllm", "torch")]
        parts = [self.source, ", ".join(versions), f"repeats {counts}"]
        return "; ".join(parts)


@dataclass(frozen=True)
class Column:
    """A column of the table: a field of the cell, or a part of a quantity's spread."""

    head: str
    name: str
    digits: int = 0
    part: Literal["median", "max", "p95", "p99", "spread"] = "median"
    unit: str = ""

    def text(self, row: MeasuredRow) -> str:
        """What stands in this row; `-` where nothing was measured."""
        if self.name in row.cell:
            return label(row.cell[self.name])
        spread = row.measured.get(self.name)
        if spread is None:
            return "-"
        if self.part == "spread":
            return spread.text(self.digits, self.unit)
        value = getattr(spread, self.part)
        if value is None:
            return "-"
        return f"{value:,.{self.digits}f}{self.unit}"


def label(value: Value) -> str:
    """A cell's value as tables show it: a method by its label."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if value in METHODS:
        return METHODS[str(value)].label
    return str(value)


def table(report: GridReport, columns: Sequence[Column]) -> str:
    """The rows as text, a line each, and the caption below them."""
    shown: list[list[str]] = []  # column by column
    for column in columns:
        texts = [column.head, *map(column.text, report.rows)]
        width = max(map(len, texts))
        shown.append([text.rjust(width) for text in texts])
    lines = ["  ".join(line) for line in zip(*shown, strict=True)]
    lines.insert(1, "─" * len(lines[0]))
    return "\n".join([*lines, *notes(report.caption)])


def notes(*sentences: str) -> list[str]:
    return textwrap.wrap(" ".join(sentences), NOTE_COLUMNS)


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


@functools.cache
def started_from() -> Provenance:
    """The commit, hardware and versions of this process, as they are when it is first asked: a
    benchmark asks before it measures, because the checkout may be another one when it has.
    """
    return provenance()


def origin(recipe: Recipe) -> dict[str, Any]:
    """The fields that every report has. Call it last: the peak memory is that so far."""
    return {**started_from(), "model": recipe.name, "peak_memory_mib": peak_memory_mib()}


def threads() -> int:
    """The number of threads of an engine in this process, or in one that it starts."""
    return int(os.environ.get("OMP_NUM_THREADS", len(usable_cores())))


def engine_settings(recipe: Recipe) -> dict[str, str]:
    arguments = recipe.engine | {"dtype": recipe.serving_dtype}
    return {key: str(value) for key, value in arguments.items()}
