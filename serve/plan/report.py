"""A plan's answer as tables in which every number says how it is known. Knows no simulation."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict

COLUMNS = 110
Basis = Literal["measured here", "measured elsewhere", "computed", "given"]
MARKS: dict[Basis, str] = {
    "measured here": "m",
    "measured elsewhere": "e",
    "computed": "c",
    "given": "g",
}


class Figure(Strict):
    """A number with its unit, and how it is known.

    `source`: the file, the command or the publication; for a computed figure, what it is computed
    from.
    """

    value: float
    unit: str
    basis: Basis
    source: str = ""

    @property
    def text(self) -> str:
        """The number with its mark, as tables show it: `41.2 c`."""
        return f"{rounded(self.value)} {MARKS[self.basis]}"


def rounded(value: float) -> str:
    """The number as text, with three digits, and commas for thousands."""
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    if abs(value) >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}"


class FigureRow(Strict):
    """A line of a table: its figures by column. A column may be missing."""

    label: str
    figures: dict[str, Figure]


def computed(values: Mapping[str, tuple[float, str]], source: str) -> dict[str, Figure]:
    """Figures, by column, of values with their units that all come from one computation."""
    figures = {}
    for column, (value, unit) in values.items():
        figures[column] = Figure(value=value, unit=unit, basis="computed", source=source)
    return figures


class Section(Strict):
    """A table. `note`: sentences below it."""

    title: str
    rows: tuple[FigureRow, ...]
    note: str = ""

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in the order in which the rows have them."""
        names: dict[str, None] = {}
        for row in self.rows:
            names |= dict.fromkeys(row.figures)
        return list(names)

    def value(self, label: str, column: str) -> float:
        """The number of a row and column. Raises KeyError where there is none."""
        rows = {row.label: row for row in self.rows}
        return rows[label].figures[column].value


class CurvePoint(Strict):
    """The figures of one method's replica at a rate."""

    method: str
    rate: float
    p50_ms: float
    p95_ms: float
    utilisation: float
    usd_per_million_checks: float  # for one replica at this rate


class PlanReport(Strict):
    """Everything in `runs/plan.json`. `hardware`: the planned device."""

    name: str
    commit: str
    hardware: str
    model: str
    source: str
    rate: float
    p95_target_ms: float
    sections: tuple[Section, ...]
    curve: tuple[CurvePoint, ...]

    def section(self, title: str) -> Section:
        """The table with this title. Raises KeyError where there is none."""
        return {section.title: section for section in self.sections}[title]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


def table(report: PlanReport) -> str:
    """The report as text."""
    lines = [f"{report.name}: {report.model} on {report.hardware}", ""]
    for section in report.sections:
        lines += [*section_lines(section), ""]
    marks = ", ".join(f"{mark} {basis}" for basis, mark in MARKS.items())
    lines += textwrap.wrap(f"{marks}. Coefficients: {report.source}.", COLUMNS)
    return "\n".join(lines)


def section_lines(section: Section) -> list[str]:
    """A section as lines: a row for each label, with the unit behind each column's name."""
    columns = section.columns
    heads = [f"{column}, {_unit(section, column)}".rstrip(", ") for column in columns]
    cells = []
    for row in section.rows:
        figures = [row.figures.get(column) for column in columns]
        cells.append([figure.text if figure else "" for figure in figures])
    widths = []
    for number, head in enumerate(heads):
        widths.append(max(len(head), *(len(row[number]) for row in cells)))
    label_width = max(len(section.title), *(len(row.label) for row in section.rows))
    lines = [f"{section.title:<{label_width}}  {_aligned(heads, widths)}"]
    lines.append("-" * len(lines[0]))
    for row, row_cells in zip(section.rows, cells, strict=True):
        lines.append(f"{row.label:<{label_width}}  {_aligned(row_cells, widths)}".rstrip())
    lines += textwrap.wrap(section.note, COLUMNS)
    return lines


def _unit(section: Section, column: str) -> str:
    units = [row.figures[column].unit for row in section.rows if column in row.figures]
    return units[0]


def _aligned(texts: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))
