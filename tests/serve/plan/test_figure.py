from __future__ import annotations

import pytest

from serve.plan.figure import Figure, FigureRow, Section, rounded


def figure(value: float) -> Figure:
    return Figure(value=value, unit="ms", basis="computed")


def test_a_number_is_shown_with_three_digits_and_how_it_is_known() -> None:
    texts = [rounded(value) for value in (0.01234, 1.234, 12.34, 1234.5, 40.0, float("inf"))]
    assert texts == ["0.0123", "1.23", "12.3", "1,234", "40", "-"]
    assert figure(12.34).text == "12.3 c"
    assert Figure(value=2, unit="", basis="measured here").text == "2 m"


def test_a_section_has_the_columns_of_all_rows_and_finds_a_value() -> None:
    rows = (
        FigureRow(label="a", figures={"x": figure(1)}),
        FigureRow(label="b", figures={"x": figure(2), "y": figure(3)}),
    )
    section = Section(title="t", rows=rows)
    assert section.columns == ["x", "y"] and section.value("b", "y") == 3
    with pytest.raises(KeyError):
        section.value("c", "x")
