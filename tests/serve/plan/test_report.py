from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve.plan.report import (
    CurvePoint,
    Figure,
    FigureRow,
    PlanReport,
    Section,
    rounded,
    section_lines,
    table,
)


def report() -> PlanReport:
    given = Figure(value=3, unit="USD an hour", basis="given", source="a list")
    usd = Figure(value=85.4, unit="USD", basis="computed", source="simulated")
    rows = (
        FigureRow(label="aLoRA", figures={"price": given, "a million checks": usd}),
        FigureRow(label="a judge", figures={"a million checks": usd}),
    )
    point = CurvePoint(
        method="alora", rate=1, p50_ms=10, p95_ms=20, utilisation=0.1, usd_per_million_checks=9
    )
    return PlanReport(
        name="small",
        commit="c0ffee",
        hardware="a core",
        model="tiny",
        source="a file",
        rate=10,
        p95_target_ms=100,
        sections=(Section(title="cost", rows=rows, note="A note."),),
        curve=(point, point.model_copy(update={"rate": 2.0})),
    )


def test_the_table_has_a_column_a_key_and_a_mark_at_every_number() -> None:
    lines = section_lines(report().section("cost"))
    assert lines[0].split() == [
        "cost",
        "price,",
        "USD",
        "an",
        "hour",
        "a",
        "million",
        "checks,",
        "USD",
    ]
    assert lines[2].split() == ["aLoRA", "3", "g", "85.4", "c"]
    assert lines[3].split() == ["a", "judge", "85.4", "c"]
    assert lines[4] == "A note."
    assert "m measured here, e measured elsewhere, c computed, g given" in table(report())


def test_the_file_says_of_every_number_how_it_is_known(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    report().save(path)
    kept = json.loads(path.read_text(encoding="utf-8"))
    for row in kept["sections"][0]["rows"]:
        assert all(figure["basis"] and figure["source"] for figure in row["figures"].values())
    assert PlanReport.model_validate_json(path.read_text(encoding="utf-8")) == report()


def test_what_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        report().section("none")
    with pytest.raises(KeyError):
        report().section("cost").value("none", "price")


def test_a_number_is_shown_with_three_digits() -> None:
    texts = [rounded(value) for value in (0.01234, 1.234, 12.34, 1234.5, 40.0, float("inf"))]
    assert texts == ["0.0123", "1.23", "12.3", "1,234", "40", "-"]
