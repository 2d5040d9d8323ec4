"""The fleet benchmarks on real servers, small.

Every server answers all of the same traffic, and the counts are right.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.bench import fleet
from serve.bench.fleet import AdaptersBench, FleetCell, ZipfBench
from serve.bench.report import GridReport, table
from serve.bench.workload.fleet_servers import (
    ALL_RESIDENT,
    BARE_BASE,
    ONE_SLOT,
    PEFT,
    SERVERS,
    WORKERS,
)
from serve.bench.workload.prompts import random_rule_text
from tests.serve.bench.small_engine import small_recipe
from tests.serve.bench.toy_bench import bench_on
from tests.serve.cards import prompts, recipe

REQUESTS, TOKENS = 24, 64
STARTED = (PEFT, ONE_SLOT, ALL_RESIDENT, BARE_BASE)  # the others differ in their slots alone
METHODS = recipe().adapter_methods
SUFFIX = len(prompts().suffix_ids(random_rule_text(recipe())))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> GridReport:
    runs = tmp_path_factory.mktemp("fleet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "TOKENS", TOKENS)
        patch.setattr(AdaptersBench, "adapters", (3,))
        patch.setattr(AdaptersBench, "alphas", (None, 1.0))
        patch.setattr(AdaptersBench, "server_names", STARTED)
        words = ["--requests", str(REQUESTS), "--repeats", "1"]
        bench = bench_on("adapters", runs, *words, recipe=small_recipe())
        patch.setattr(AdaptersBench, "draw", lambda *_: [])  # two kinds of traffic in a plot
        bench.main()
    return GridReport.load(runs / "adapters_bench.json")


@pytest.mark.slow
def test_every_server_answers_every_traffic(report: GridReport, tmp_path: Path) -> None:
    every = [
        (method, alpha, server) for method in METHODS for alpha in (None, 1.0) for server in STARTED
    ]
    cells = [row.cell for row in report.rows]
    assert [(cell["method"], cell["alpha"], cell["server"]) for cell in cells] == every
    for row in report.rows:
        assert row.measured["requests_per_second"].min > 0 < row.measured["request_ms"].min
        assert row.median("used_adapters") == 3 and row.median("requests") == REQUESTS
        assert ("of_base" in row.measured) == (row.cell["server"] != BARE_BASE)
    panels = bench_on("adapters", tmp_path).panels(report)
    assert [panel.title for panel in panels] == ["method: LoRA", "method: aLoRA"]
    text = table(report, AdaptersBench.columns)
    assert all(name in text for name in (*STARTED, " LoRA ", " aLoRA "))


@pytest.mark.slow
def test_every_server_computes_every_conversation_and_reads_what_it_has_no_place_for(
    report: GridReport,
) -> None:
    """Two of them are one engine, and all get the same requests: none may find in a cache what
    another one computed.
    """
    computed: dict[object, set[float]] = {}
    for row in report.rows:
        server, swap_ins = row.cell["server"], row.median("swap_ins")
        tokens = row.median("computed_tokens")
        assert tokens == pytest.approx(REQUESTS * (TOKENS + SUFFIX), rel=0.03)
        assert row.median("forward_passes") >= REQUESTS / WORKERS
        # An engine's host memory holds all three.
        assert row.median("adapter_loads") == (swap_ins if server == PEFT else 0)
        if row.cell["alpha"] is None:  # 3 adapters over 24 requests, 16 of them at a time
            assert swap_ins >= 4 if server == ONE_SLOT else swap_ins == 0
        if server not in (PEFT, BARE_BASE):
            computed.setdefault((row.cell["method"], row.cell["alpha"]), set()).add(tokens)
    assert [len(tokens) for tokens in computed.values()] == [1, 1, 1, 1]


def test_the_cells_are_the_two_benchmarks(tmp_path: Path) -> None:
    sweep: list[FleetCell] = bench_on("adapters", tmp_path).cells()
    zipf: list[FleetCell] = bench_on("fleet", tmp_path).cells()
    adapters = dict.fromkeys(cell.adapters for cell in sweep)
    assert list(adapters) == [1, 2, 4, 8, 16, 32, 33, 64, 128]
    assert {cell.server for cell in sweep} == set(SERVERS)
    assert {cell.alpha for cell in sweep} == {None}
    assert {cell.adapters for cell in zipf} == {1024} and zipf[-1].alpha == 2.0
    assert {cell.requests_of(256) for cell in sweep if cell.server == PEFT} == {64, 128}
    assert {cell.requests_of(512) for cell in zipf} == {512}
    assert (AdaptersBench.requests, ZipfBench.requests) == (256, 512)
    quick: list[FleetCell] = bench_on("fleet", tmp_path, "--quick").cells()
    assert len(quick) == 8 and {(cell.adapters, cell.alpha) for cell in quick} == {(33, 2.0)}


def test_round_robin_every_adapter_gets_a_request_also_by_peft(tmp_path: Path) -> None:
    for cell in bench_on("adapters", tmp_path).cells():
        drawn = cell.drawn(256, seed=0)[: cell.requests_of(256)]
        assert set(drawn) == set(range(cell.adapters)), cell
    few = FleetCell(method="lora", adapters=3, alpha=None, server=PEFT)
    assert (few.requests_of(40), few.requests_of(24)) == (32, 24)
    assert few.drawn(5, seed=0) == [0, 1, 2, 0, 1]
    zipf = FleetCell(method="lora", adapters=3, alpha=1.0, server=ALL_RESIDENT)
    assert zipf.drawn(50, seed=1) == zipf.drawn(50, seed=1) != zipf.drawn(50, seed=2)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match=r"not a decoder.*NAME=encoder"):
        bench_on("adapters", tmp_path, recipe=load_recipe("minilm"))
