"""A plan's answer as tables in which every number says how it is known. Knows no simulation."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict
from serve.plan.figure import MARKS, Section

COLUMNS = 110


class CurvePoint(Strict):
    """The figures of one method's replica at a rate."""

    method: str
    rate: float
    p50_ms: float
    p95_ms: float
    utilisation: float
    usd_per_million_checks: float  # for one replica at this rate


class JsonReport(Strict):
    """A report that is kept as a JSON file."""

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


class PlanReport(JsonReport):
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
        for section in self.sections:
            if section.title == title:
                return section
        raise KeyError(title)


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
    cells = [
        [_cell(section, row, column) for column in columns] for row in range(len(section.rows))
    ]
    widths = []
    for number, head in enumerate(heads):
        widths.append(max(len(head), *(len(row[number]) for row in cells)))
    labels = [row.label for row in section.rows]
    label_width = max(len(section.title), *map(len, labels))
    lines = [f"{section.title:<{label_width}}  {_aligned(heads, widths)}"]
    lines.append("-" * len(lines[0]))
    for label, row_cells in zip(labels, cells, strict=True):
        lines.append(f"{label:<{label_width}}  {_aligned(row_cells, widths)}".rstrip())
    lines += textwrap.wrap(section.note, COLUMNS)
    return lines


def _unit(section: Section, column: str) -> str:
    for row in section.rows:
        if column in row.figures:
            return row.figures[column].unit
    return ""


def _cell(section: Section, row: int, column: str) -> str:
    figure = section.rows[row].figures.get(column)
    return figure.text if figure is not None else ""


def _aligned(texts: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))
