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
    """A number with its unit and its basis.

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
    if value != value or abs(value) == float("inf"):
        return "-"
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


class FigureRow(Strict):
    """A line of a table: its figures by column. A column may be missing."""

    label: str
    figures: dict[str, Figure]


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
        for row in self.rows:
            if row.label == label:
                return row.figures[column].value
        raise KeyError(label)
