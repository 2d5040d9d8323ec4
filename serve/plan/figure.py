"""A number of a plan, and how it came to be known. Values only."""

from __future__ import annotations

from typing import Literal

from guard.files.yaml_file import Strict

Basis = Literal["measured here", "measured elsewhere", "computed", "given"]
MARKS: dict[Basis, str] = {
    "measured here": "m",
    "measured elsewhere": "e",
    "computed": "c",
    "given": "g",
}


class Figure(Strict):
    """`source`: the file, the command or the publication; of a computed one, what from."""

    value: float
    unit: str
    basis: Basis
    source: str = ""

    @property
    def text(self) -> str:
        """With its mark, as tables show it: `41.2 c`."""
        return f"{rounded(self.value)} {MARKS[self.basis]}"


def rounded(value: float) -> str:
    """Three digits, thousands with commas."""
    if value != value or abs(value) == float("inf"):
        return "-"
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


class FigureRow(Strict):
    """A line of a table: figures by column; a column may be missing."""

    label: str
    figures: dict[str, Figure]


class Section(Strict):
    """A table. `note`: sentences below it."""

    title: str
    rows: tuple[FigureRow, ...]
    note: str = ""

    @property
    def columns(self) -> list[str]:
        """In the order in which rows bring them."""
        names: dict[str, None] = {}
        for row in self.rows:
            names |= dict.fromkeys(row.figures)
        return list(names)

    def value(self, label: str, column: str) -> float:
        """Of a row and column. Raises KeyError where there is none."""
        for row in self.rows:
            if row.label == label:
                return row.figures[column].value
        raise KeyError(label)
