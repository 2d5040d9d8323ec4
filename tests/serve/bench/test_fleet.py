"""The fleet benchmark: all servers get the same traffic and compute it, and the PEFT baseline
answers as PEFT does and keeps an LRU, or beating it would mean nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pytest import MonkeyPatch

from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.bench import fleet
from serve.bench.fleet import (
    ALL_RESIDENT,
    BARE_BASE,
    ONE_SLOT,
    PEFT,
    WORKERS,
    FleetCell,
    closed_loop,
)
from serve.bench.report import GridReport
from serve.bench.workload.peft_baseline import PeftBaseline
from serve.bench.workload.prompts import random_rule_text
from serve.engine import ScoreRequest
from tests.serve.bench.toy_bench import bench_on
from tests.serve.cards import prompts, recipe
from tests.serve.guarded import CONVERSATION, peft_logit, save_adapter

TEXT, REQUESTS, TOKENS = "The assistant must not be rude.", 24, 64
SERVERS = (PEFT, ONE_SLOT, ALL_RESIDENT, BARE_BASE)


@pytest.mark.slow
def test_every_server_computes_every_conversation_of_every_traffic(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "TOKENS", TOKENS)
    monkeypatch.setattr(fleet, "SLOTS_OF", {ONE_SLOT: 1, ALL_RESIDENT: 3})
    monkeypatch.setattr(fleet, "SERVERS", SERVERS)
    monkeypatch.setattr(fleet, "TRAFFIC", ((3, None, REQUESTS), (3, 1.0, REQUESTS)))
    bench_on("fleet", tmp_path, "--repeats", "1").main()
    report = GridReport.load(tmp_path / "fleet_bench.json")
    assert [row.cell["server"] for row in report.rows] == [*SERVERS] * 4
    suffix = len(prompts().suffix_ids(random_rule_text(recipe())))
    for row in report.rows:
        server, hits = row.cell["server"], row.measured.get("hit_percent")
        computed = pytest.approx(REQUESTS * (TOKENS + suffix), rel=0.03)  # nothing was cached
        assert row.median("computed_tokens") == computed
        assert row.median("requests_per_second") > 0 < row.measured["request_ms"].min
        assert ("of_base" in row.measured) == (server != BARE_BASE) == (hits is not None)
        if row.cell["alpha"] is None and hits is not None:
            assert (hits.median == 100) == (server != ONE_SLOT)


def test_round_robin_takes_turns_and_zipf_s_law_is_followed() -> None:
    assert FleetCell("lora", 3, None, 5, PEFT).drawn(seed=0) == [0, 1, 2, 0, 1]
    for alpha in (0.5, 1.2):
        cell = FleetCell("lora", 50, alpha, 200_000, PEFT)
        drawn = cell.drawn(seed=1)
        assert drawn == cell.drawn(seed=1) != cell.drawn(seed=2)
        assert drawn.count(0) / drawn.count(9) == pytest.approx(10**alpha, rel=0.1)


def test_the_fleet_has_servers_of_its_own_and_an_encoder_has_no_random_ones(tmp_path: Path) -> None:
    cells: list[FleetCell] = bench_on("fleet", tmp_path).cells()
    assert len({cell.group for cell in cells}) == 4
    assert {cell.adapters for cell in cells if cell.alpha is not None} == {fleet.FLEET}
    with pytest.raises(GuardError, match="Name a decoder"):
        bench_on("fleet", tmp_path, recipe=load_recipe("minilm")).main()


@pytest.mark.slow
def test_peft_answers_as_by_itself_whatever_is_in_the_batch_and_reads_the_least_recently_used_again(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    names, folders = ("one", "two", "three"), dict[str, Path]()
    for seed, name in enumerate(names):
        folders[name] = save_adapter(tmp_path / name, name, seed=seed)
    server = PeftBaseline(recipe(), folders, capacity=2, batch=16)
    asked = list(zip((1, 2, 3, 2, 3, 1, 3, 1, 2), names * 3, strict=True))
    requests = [ScoreRequest(CONVERSATION[:turns], TEXT, name) for turns, name in asked]
    calls = [server.submit([request]) for request in requests]
    for _ in range(5):  # two of the three adapters at a time
        assert not calls[-1].done
        server.step()
    expected = [peft_logit(CONVERSATION[:turns], TEXT, folders[name]) for turns, name in asked]
    assert [call.results()[0].logit for call in calls] == pytest.approx(expected, abs=2e-3)
    assert len({round(logit, 3) for logit in expected}) == len(expected)
    dense: list[str] = []  # what oneDNN does not compute, nor an adapter
    for name, layer in server._model.named_modules():
        if type(layer) is torch.nn.Linear and "lora_" not in name:
            dense.append(name.rpartition(".")[2])
    assert dense == ["lm_head"]
    read: list[int] = []
    for name in ("one", "two", "one", "three", "one", "two"):
        closed_loop(server, [ScoreRequest(CONVERSATION[:1], TEXT, name)])
        read.append(server.counters.swap_ins)
    assert [count - read[1] for count in read[2:]] == [0, 1, 1, 2]
    waiting: list[int] = []
    answer = server.step

    def step() -> None:
        waiting.append(len(server._queue))
        answer()

    monkeypatch.setattr(server, "step", step)
    closed_loop(server, requests[:1] * (WORKERS + 3))
    assert waiting == [WORKERS, 3]
