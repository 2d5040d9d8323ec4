"""Spreads, columns, and where a report comes from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.bench.report import (
    BenchReport,
    Column,
    MeasuredRow,
    Spread,
    origin,
    peak_of_processes_mib,
    started_from,
)


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
    assert row.number("tokens") == 5000.0 and row.number("ms") == row.median("ms") == 2.0
    columns = {
        Column("", "tokens"): "5,000",
        Column("", "method"): "aLoRA",
        Column("", "alpha"): "-",
        Column("", "share"): "0.7",
        Column("", "ms", 1): "2.0",
        Column("", "ms", part="max", unit="x"): "6x",
        Column("", "ms", part="spread"): "2 (1 to 6)",
        Column("", "ms", part="p95"): "-",
        Column("", "not measured"): "-",
    }
    assert {column: column.text(row) for column in columns} == columns


HOLDS_MEMORY = "held = bytearray(b'1') * (300 * 2**20); del held; print(flush=True); input()"


def test_the_peak_of_memory_is_the_largest_of_the_processes() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLDS_MEMORY], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        peak_mib = peak_of_processes_mib()
        child.kill()
    assert peak_mib > 300


def test_a_report_names_the_commit_from_before_it_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = started_from()
    checked_out_since = before | {"commit": before["commit"] + "0"}
    monkeypatch.setattr("serve.bench.report.provenance", lambda: checked_out_since)
    assert origin(load_recipe("tiny"))["commit"] == before["commit"]


def test_a_report_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"commit": "abc"}')
    with pytest.raises(GuardError):
        BenchReport.load(tmp_path / "report.json")
