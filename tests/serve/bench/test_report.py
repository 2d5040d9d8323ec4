"""Spreads, and the files of reports: those that were kept load in today's classes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.home import ROOT
from guard.recipe import load_recipe
from serve.bench.fleet.report import FleetReport
from serve.bench.fleet.report import table as fleet_table
from serve.bench.latency.report import LatencyReport
from serve.bench.latency.report import table as latency_table
from serve.bench.load.report import LoadReport
from serve.bench.load.report import table as load_table
from serve.bench.report import (
    FEWEST_FOR_P95,
    BenchReport,
    Spread,
    notes,
    origin,
    peak_of_processes_mib,
    percentile,
    percentiles,
    publish,
    started_from,
)

# Beginning of the files' names -> the class that wrote them, its table
KEPT = {
    "latency_tiny_2cores": (LatencyReport, latency_table),
    "adapters_": (FleetReport, fleet_table),
    "fleet_": (FleetReport, fleet_table),
    "load_": (LoadReport, load_table),
}


def test_a_spread_is_median_smallest_and_largest() -> None:
    spread = Spread.of([3.0, 1.0, 2.0, 10.0])
    assert (spread.median, spread.min, spread.max, spread.p95) == (2.5, 1.0, 10.0, None)
    values = [float(value) for value in range(1, FEWEST_FOR_P95 + 1)]
    assert Spread.of(values, with_p95=True).p95 == 19.05
    assert Spread.of(values[1:], with_p95=True).p95 is None
    assert Spread.of([157.4, 150, 162]).text() == "157 (150 to 162)"
    assert Spread.of([1.06, 1.0, 1.214]).text(2, "x") == "1.06x (1.00 to 1.21)"


def test_percentiles_are_the_fields_of_a_row() -> None:
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentiles([0.0, 100.0]) == {"p50_ms": 50.0, "p95_ms": 95.0, "p99_ms": 99.0}


def test_notes_are_sentences_in_lines() -> None:
    lines = notes("A sentence.", *["Another one that is longer."] * 10)
    assert len(lines) > 2 and max(map(len, lines)) <= 110
    assert " ".join(lines).startswith("A sentence. Another one")


def base_report() -> BenchReport:
    versions = {"vllm": "0.32.0"}
    return BenchReport(
        commit="abc", hardware="two cores", versions=versions, model="tiny", peak_memory_mib=1234.0
    )


HOLDS_MEMORY = "held = bytearray(b'1') * (300 * 2**20); del held; print(flush=True); input()"


def test_the_peak_of_memory_is_the_largest_of_the_processes() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLDS_MEMORY], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        peak_mib = peak_of_processes_mib()
        child.kill()
    assert peak_mib > 300
    own_mib = origin(load_recipe("tiny"))["peak_memory_mib"]
    assert origin(load_recipe("tiny"), peak_mib, own_mib + 500)["peak_memory_mib"] == own_mib + 500


def test_a_report_names_the_commit_from_before_it_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = started_from()
    checked_out_since = before | {"commit": before["commit"] + "0"}
    monkeypatch.setattr("serve.bench.report.provenance", lambda: checked_out_since)
    assert origin(load_recipe("tiny"))["commit"] == before["commit"]


def test_a_report_is_published_as_file_plot_and_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "report.json"
    publish(base_report(), path, lambda _: "a table", lambda _, plot: plot.write_text("plot"))
    assert BenchReport.load(path) == base_report()
    assert path.with_suffix(".png").read_text() == "plot"
    printed = capsys.readouterr().out
    assert "a table" in printed and "1,234 MiB" in printed and f"{path}, " in printed


def test_a_report_without_a_plot_is_published_as_file_and_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.png").write_text("of an earlier report")
    publish(base_report(), tmp_path / "report.json", lambda _: "a table")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert f"written: {tmp_path / 'report.json'}\n" in capsys.readouterr().out


def test_a_report_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"commit": "abc"}')
    with pytest.raises(GuardError):
        BenchReport.load(tmp_path / "report.json")


@pytest.mark.parametrize("beginning", KEPT)
def test_the_kept_files_load_and_have_a_table(beginning: str) -> None:
    files = sorted((ROOT / "docs" / "benchmarks").rglob(f"{beginning}*.json"))
    assert files
    kind, table = KEPT[beginning]
    for file in files:
        report = kind.load(file)
        assert report.commit in table(report)  # type: ignore[operator]
