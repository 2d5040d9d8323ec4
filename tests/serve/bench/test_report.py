"""Spreads, columns, plots, and where a report comes from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest import MonkeyPatch

from guard.recipe import load_recipe
from serve.bench import plot
from serve.bench.plot import LOWER_BOUND, Panel
from serve.bench.report import (
    Column,
    GridReport,
    MeasuredRow,
    Spread,
    origin,
    peak_of_processes_mib,
    started_from,
)
from tests.serve.bench.drawn import drawn, lines_of, points_of


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


HOLDS_MEMORY = "held = bytearray(b'1') * (300 * 2**20); del held; print(flush=True); input()"


def test_the_peak_of_memory_is_the_largest_of_the_processes() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLDS_MEMORY], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        peak_mib = peak_of_processes_mib()
        child.kill()
    assert peak_mib > 300


def test_a_report_names_the_commit_from_before(monkeypatch: MonkeyPatch) -> None:
    before = started_from()
    checked_out_since = before | {"commit": before["commit"] + "0"}
    monkeypatch.setattr("serve.bench.report.provenance", lambda: checked_out_since)
    assert origin(load_recipe("tiny"))["commit"] == before["commit"]


def rows_of(line: str, *walls_ms: float) -> list[MeasuredRow]:
    rows: list[MeasuredRow] = []
    for number, wall_ms in enumerate(walls_ms):
        measured = {"wall_ms": Spread.of([wall_ms, wall_ms + 2]), "p": Spread.of([7.0])}
        if line == "lora":
            measured["over_alora"] = Spread.of([10.0**number])
        rows.append(
            MeasuredRow(cell={"rules": 10**number, "mode": line}, repeats=2, measured=measured)
        )
    return rows


def report_of(rows: Sequence[MeasuredRow]) -> GridReport:
    return GridReport(
        commit="abc1234",
        hardware="two cores",
        versions={"vllm": "0.32.0", "torch": "2.13.0"},
        model="tiny",
        peak_memory_mib=1.0,
        benchmark="toy",
        inputs="inputs",
        threads=2,
        engine={},
        facts={},
        is_resumed=False,
        ended_by=None,
        left_out=(),
        rows=tuple(rows),
    )


ROWS = [*rows_of("lora", 1, 10, 100), *rows_of("alora", 1, 2, 3), *rows_of(LOWER_BOUND, 1, 1, 1)]


def test_every_line_has_its_points_a_band_and_one_colour_in_all_panels(tmp_path: Path) -> None:
    panels = [
        Panel(ROWS, "rules", "wall_ms", "mode", title="rules", note="over_alora"),
        Panel(ROWS[3:], "rules", "wall_ms", "mode", is_log=False),
        Panel(ROWS[:3], "rules", "p", "", x_label="rules"),
    ]
    figure = drawn(
        lambda report, path: plot.draw(panels, report, path), report_of(ROWS), tmp_path / "a.png"
    )
    left, right, without_lines = figure.axes
    lines = lines_of(left)
    assert list(lines) == ["LoRA", "aLoRA", LOWER_BOUND]
    assert points_of(lines["LoRA"]) == [(1.0, 2.0), (10.0, 11.0), (100.0, 101.0)]
    assert len(left.collections) == 3 and lines[LOWER_BOUND].get_linestyle() == "--"
    assert lines["aLoRA"].get_color() == lines_of(right)["aLoRA"].get_color()
    assert [text.get_text() for text in left.texts] == ["10x", "100x"]
    assert (left.get_xscale(), right.get_xscale()) == ("log", "linear")
    assert left.get_title(loc="left") == "rules"
    assert points_of(lines_of(without_lines)["p"]) == [(1.0, 7.0), (10.0, 7.0), (100.0, 7.0)]
    caption = " ".join(figure.get_supxlabel().split())
    assert "tiny on two cores; commit abc1234; vllm 0.32.0, torch 2.13.0; repeats 2" in caption
