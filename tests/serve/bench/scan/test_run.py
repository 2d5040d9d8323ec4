"""The whole benchmark on a few conversations: killed, by turns with the engine, and on Ray."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from serve.bench.scan import run as benchmark
from serve.bench.scan import stored
from serve.bench.scan.report import ScanReport, table
from serve.bench.scan.run import run
from tests.serve.bench.small_engine import small_recipe

pytestmark = pytest.mark.slow
ROWS = 96


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "RULES", 3)
    monkeypatch.setattr(stored, "LONGEST", 60)
    monkeypatch.setattr(stored, "UNREADABLE_EVERY", 50)


@pytest.mark.usefixtures("uncompiled")
def test_a_killed_scan_ends_as_one_left_alone(tmp_path: Path) -> None:
    report = run(small_recipe(), ["killed", "throughput"], ROWS, kills=1, repeats=1)
    killed, throughput = report.killed, report.throughput
    assert killed is not None and throughput is not None
    assert (killed.conversations, killed.rows, killed.kills) == (ROWS, 3 * ROWS, 1)
    assert (killed.missing_rows, killed.extra_rows, killed.repeated_rows) == (0, 0, 0)
    assert killed.different_rows == 0
    assert killed.identical_files == killed.files == 32 and killed.largest_change == 0
    assert throughput.conversations == ROWS - 1 and throughput.rows_a_part == ROWS // 2
    assert throughput.ratio.median > 0
    report.save(tmp_path / "scan_bench.json")
    assert ScanReport.load(tmp_path / "scan_bench.json") == report
    assert "1 times killed" in table(report)


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_actors_are_measured_beside_a_scan_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "ACTORS", (0, 1))
    report = run(small_recipe(), ["cluster"], ROWS, kills=1, repeats=1)
    alone, actor = report.cluster
    assert (alone.actors, actor.actors) == (0, 1)
    assert alone.conversations == actor.conversations == ROWS
    assert alone.idle_ms == 0 < actor.idle_ms and actor.per_s > 0
