"""The fleet benchmarks on real engines, small: the same traffic for all, and right counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest import MonkeyPatch

from serve.bench import fleet
from serve.bench.fleet import AdaptersBench, FleetCell
from serve.bench.report import GridReport, table
from serve.bench.workload.fleet_servers import ALL_RESIDENT, BARE_BASE, ONE_SLOT, PEFT, WORKERS
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
    with MonkeyPatch.context() as patch:
        patch.setattr(fleet, "TOKENS", TOKENS)
        patch.setattr(AdaptersBench, "adapters", (3,))
        patch.setattr(AdaptersBench, "alphas", (None, 1.0))
        patch.setattr(AdaptersBench, "server_names", STARTED)
        words = ["--requests", str(REQUESTS), "--repeats", "1"]
        bench = bench_on("adapters", runs, *words, recipe=small_recipe())
        bench.main()
    return GridReport.load(runs / "adapters_bench.json")


@pytest.mark.slow
def test_every_server_answers_every_traffic(report: GridReport) -> None:
    every = [
        (method, alpha, server) for method in METHODS for alpha in (None, 1.0) for server in STARTED
    ]
    cells = [row.cell for row in report.rows]
    assert [(cell["method"], cell["alpha"], cell["server"]) for cell in cells] == every
    for row in report.rows:
        assert row.measured["requests_per_second"].min > 0 < row.measured["request_ms"].min
        assert row.median("used_adapters") == 3 and row.median("requests") == REQUESTS
        assert ("of_base" in row.measured) == (row.cell["server"] != BARE_BASE)
    text = table(report, AdaptersBench.columns)
    assert all(name in text for name in (*STARTED, " LoRA ", "aLoRA "))


@pytest.mark.slow
def test_every_server_computes_every_conversation(report: GridReport) -> None:
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
        assert row.median("adapter_loads") == {PEFT: swap_ins}.get(str(server), 0)
        if row.cell["alpha"] is None:  # 3 adapters over 24 requests, 16 of them at a time
            assert (swap_ins >= 4) == (server == ONE_SLOT)
            assert (swap_ins == 0) == (server != ONE_SLOT)
        if server not in (PEFT, BARE_BASE):
            computed.setdefault((row.cell["method"], row.cell["alpha"]), set()).add(tokens)
    assert [len(tokens) for tokens in computed.values()] == [1, 1, 1, 1]


def test_round_robin_every_adapter_gets_a_request_also_by_peft(tmp_path: Path) -> None:
    for cell in bench_on("adapters", tmp_path).cells():
        drawn = cell.drawn(256, seed=0)[: cell.requests_of(256)]
        assert set(drawn) == set(range(cell.adapters)), cell
    few = FleetCell(method="lora", adapters=3, alpha=None, server=PEFT)
    assert (few.requests_of(40), few.requests_of(24)) == (32, 24)
    assert few.drawn(5, seed=0) == [0, 1, 2, 0, 1]
    zipf = FleetCell(method="lora", adapters=3, alpha=1.0, server=ALL_RESIDENT)
    assert zipf.drawn(50, seed=1) == zipf.drawn(50, seed=1) != zipf.drawn(50, seed=2)
