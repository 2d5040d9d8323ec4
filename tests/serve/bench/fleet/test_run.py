"""The fleet benchmarks on real servers, small: every server answers all of the same traffic, and the counts are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from guard.files.yaml_file import validate
from guard.method import METHODS
from serve.bench.fleet import run as fleet_bench
from serve.bench.fleet.report import SERVERS, FleetReport, draw, table
from serve.bench.fleet.run import Cell, run
from serve.bench.workload import told
from tests.serve.guarded import prompts, recipe

SUFFIX = len(prompts().suffix_ids(told(recipe())))


@pytest.fixture(scope="module")
def report() -> FleetReport:
    small = recipe().model_copy(
        update={"engine": recipe().engine | {"kv_cache_memory_bytes": 2**26}}
    )
    return run(small, [Cell(3, 40), Cell(3, 40, alpha=1.0)], SERVERS, repeats=2)


def test_every_server_answers_every_traffic(report: FleetReport) -> None:
    every = [
        (method, alpha, server) for method in METHODS for alpha in (None, 1.0) for server in SERVERS
    ]
    assert [(row.method, row.alpha, row.server) for row in report.rows] == every
    for row in report.rows:
        assert 0 < row.per_second_min <= row.per_second <= row.per_second_max
        assert 0 < row.p50_ms <= row.p95_ms <= row.p99_ms
        assert row.working_set == 3 and row.requests == (32 if row.server == "PEFT" else 40)
    assert report.peak_memory_mib > 100


def test_adapters_are_brought_again_only_where_there_is_one_place(report: FleetReport) -> None:
    for method in METHODS:
        brought = {
            row.server: row.brought
            for row in report.rows
            if row.alpha is None and row.method == method
        }
        assert brought.pop("one slot") >= 6  # 3 adapters over 40 requests, 16 of them at a time
        assert set(brought.values()) == {0}


def test_every_server_computes_every_conversation(report: FleetReport) -> None:
    """Two of them are one engine, and all are asked the same: none may find in a cache what another one computed."""
    for row in report.rows:
        assert row.computed_tokens == pytest.approx(
            row.requests * (fleet_bench.TOKENS + SUFFIX), rel=0.03
        )
        assert row.brought_mib == pytest.approx(row.brought * row.adapter_mib)
        assert row.read == (
            row.brought if row.server == "PEFT" else 0
        )  # an engine's host memory holds all three
    for kind in [(method, alpha) for method in METHODS for alpha in (None, 1.0)]:
        engines = [
            row
            for row in report.rows
            if (row.method, row.alpha) == kind and row.server not in ("PEFT", "base")
        ]
        assert len({row.computed_tokens for row in engines}) == 1


def test_the_report_is_kept_whole_and_drawn(report: FleetReport, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "fleet.json"
    report.save(path)
    assert validate(json.loads(path.read_text()), FleetReport, where=path) == report
    text = table(report)
    assert all(name in text for name in (*SERVERS, " LoRA ", " aLoRA "))
    for rows in (
        [row for row in report.rows if row.alpha is None],
        [row for row in report.rows if row.alpha is not None],
    ):
        draw(report.model_copy(update={"rows": tuple(rows)}), tmp_path / "plot.png")
        with Image.open(tmp_path / "plot.png") as image:
            assert image.size == (2100, 780)
