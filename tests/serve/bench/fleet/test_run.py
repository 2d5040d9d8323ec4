"""The fleet benchmarks on real servers, small.

Every server answers all of the same traffic, and the counts are right.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from serve.bench.fleet.report import (
    ALL_RESIDENT,
    BARE_BASE,
    ONE_SLOT,
    PEFT,
    SERVERS,
    FleetReport,
    draw,
    table,
)
from serve.bench.fleet.run import PLANS, FleetCell, run
from serve.bench.fleet.servers import WORKERS
from serve.bench.workload.prompts import random_rule_text
from tests.serve.bench.small_engine import small_recipe
from tests.serve.cards import prompts, recipe

pytestmark = pytest.mark.slow

REQUESTS, TOKENS = 24, 64
METHODS = recipe().adapter_methods
SUFFIX = len(prompts().suffix_ids(random_rule_text(recipe())))


@pytest.fixture(scope="module")
def report() -> FleetReport:
    cells = [FleetCell(3, REQUESTS), FleetCell(3, REQUESTS, alpha=1.0)]
    return run(small_recipe(), cells, tuple(SERVERS), 1, METHODS, TOKENS)


def test_every_server_answers_every_traffic(report: FleetReport) -> None:
    every = []
    for method in METHODS:
        for alpha in (None, 1.0):
            every += [(method, alpha, server) for server in SERVERS]
    assert [(row.method, row.alpha, row.server) for row in report.rows] == every
    for row in report.rows:
        assert 0 < row.requests_per_second.min <= row.requests_per_second.median
        assert 0 < row.p50_ms <= row.p95_ms <= row.p99_ms
        assert row.working_set == 3 and row.requests == REQUESTS
    assert report.peak_memory_mib > 100


def test_adapters_are_swapped_in_again_only_where_there_is_one_slot(report: FleetReport) -> None:
    for method in METHODS:
        swap_ins = {
            row.server: row.swap_ins
            for row in report.rows
            if row.alpha is None and row.method == method
        }
        # 3 adapters over 24 requests, 16 of them at a time
        assert swap_ins.pop(ONE_SLOT) >= 4
        assert set(swap_ins.values()) == {0}


def test_every_server_computes_every_conversation(report: FleetReport) -> None:
    """Two of them are one engine, and all get the same requests.

    None may find in a cache what another one computed.
    """
    for row in report.rows:
        assert row.computed_tokens == pytest.approx(row.requests * (TOKENS + SUFFIX), rel=0.03)
        assert (row.forward_passes or 0) >= row.requests / WORKERS
        # An engine's host memory holds all three.
        assert row.adapter_loads == (row.swap_ins if row.server == PEFT else 0)
    computed: dict[object, set[int]] = {}
    for row in report.rows:
        if row.server not in (PEFT, BARE_BASE):
            computed.setdefault(row.traffic, set()).add(row.computed_tokens)
    assert [len(tokens) for tokens in computed.values()] == [1, 1, 1, 1]


def test_shares_of_the_throughput_are_of_the_same_traffic(report: FleetReport) -> None:
    for row in report.rows:
        assert report.throughput_share(row, row.server) == "100%"
    assert report.throughput_share(report.rows[0], "nobody") == ""


def test_the_plans_are_the_two_benchmarks() -> None:
    sweep, fleet = (plan.cells(plan.requests) for plan in PLANS.values())
    assert [cell.adapters for cell in sweep] == [1, 2, 4, 8, 16, 32, 33, 64, 128]
    assert {cell.alpha for cell in sweep} == {None}
    assert {cell.adapters for cell in fleet} == {1024} and fleet[-1].alpha == 2.0
    assert {cell.requests_to(PEFT) for cell in sweep} == {64, 128}
    assert fleet[0].requests_to(PEFT) == fleet[0].requests_to(ALL_RESIDENT) == 512
    assert FleetCell(3, 40).requests_to(PEFT) == 32 and FleetCell(3, 24).requests_to(PEFT) == 24
    assert FleetCell(3, 5).drawn(seed=0) == [0, 1, 2, 0, 1]


def test_round_robin_every_adapter_gets_a_request_also_by_peft() -> None:
    for cell in PLANS["adapters"].cells(256):
        drawn = cell.drawn(seed=0)[: cell.requests_to(PEFT)]
        assert set(drawn) == set(range(cell.adapters)), cell


def test_the_report_is_kept_whole_and_drawn(report: FleetReport, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "fleet.json"
    report.save(path)
    assert FleetReport.load(path) == report
    text = table(report)
    assert all(name in text for name in (*SERVERS, " LoRA ", " aLoRA "))
    for rows in (
        [row for row in report.rows if row.alpha is None],
        [row for row in report.rows if row.alpha is not None],
    ):
        draw(report.model_copy(update={"rows": tuple(rows)}), tmp_path / "plot.png")
        with Image.open(tmp_path / "plot.png") as image:
            assert image.size == (2100, 780)
