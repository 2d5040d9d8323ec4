"""Spreads, columns, and where a report comes from."""

from __future__ import annotations

from pytest import MonkeyPatch

from guard.recipe import load_recipe
from serve.bench.report import Column, MeasuredRow, Spread, origin, started_from


def test_a_spread_is_median_smallest_and_largest() -> None:
    spread = Spread.of([3.0, 1.0, 2.0, 10.0])
    assert (spread.median, spread.min, spread.max, spread.p95) == (2.5, 1.0, 10.0, None)
    values = [float(value) for value in range(1, 21)]
    assert (Spread.of(values).p95, Spread.of(values[1:]).p95) == (19.05, None)  # of 20 or more
    assert (Spread.of(values).p99, Spread.of(values * 5).p99) == (None, 20.0)  # of 100 or more
    assert Spread.of([157.4, 150, 162]).text() == "157 (150 to 162)"
    assert Spread.of([1.06, 1.0, 1.214]).text(2, "x") == "1.06x (1.00 to 1.21)"


def test_a_column_shows_a_field_or_a_part_of_a_quantity() -> None:
    cell = {"tokens": 5000, "method": "alora", "alpha": None, "share": 0.7}
    row = MeasuredRow(cell=cell, repeats=3, measured={"ms": Spread.of([1.0, 2.0, 6.0])})
    shown = [Column("", name).text(row) for name in (*cell, "ms", "not measured")]
    assert shown == ["5,000", "aLoRA", "-", "0.7", "2", "-"]
    assert Column("", "ms", 1, "spread").text(row) == "2.0 (1.0 to 6.0)"
    assert Column("", "ms", part="max", unit="x").text(row) == "6x"
    assert Column("", "ms", part="p95").text(row) == "-"


def test_a_report_names_the_commit_from_before(monkeypatch: MonkeyPatch) -> None:
    before = started_from()
    checked_out_since = before | {"commit": before["commit"] + "0"}
    monkeypatch.setattr("serve.bench.report.provenance", lambda: checked_out_since)
    assert origin(load_recipe("tiny"))["commit"] == before["commit"]
