from __future__ import annotations

from pathlib import Path

import pytest

from serve.plan.build import planned_load
from serve.plan.deployment import deploy
from serve.plan.sharding import Sharding, sharding
from tests.serve.plan.deployments import calibrated, plan


def compared(runs: Path, tokens: int, rules: int, load_ms: float, **plan_keys: object) -> Sharding:
    calibrated(runs, load_ms=load_ms)
    traffic = {"lengths": [tokens, tokens], "rules_a_check": [8, 8], "rules": rules, "zipf": 0.0}
    made, load = planned_load(plan(traffic=traffic, checks=100, **plan_keys), runs)
    return sharding(deploy(made, runs).methods[0], load.source)


def test_shards_win_where_reading_adapters_costs_more_than_another_prefill(tmp_path: Path) -> None:
    few = {"slots": 10, "host_gib": 0.01}
    slow_disk = compared(tmp_path / "slow", tokens=20, rules=40, load_ms=200.0, **few)
    assert slow_disk.sharded.shards == 4
    assert slow_disk.swapping.loads > 0.5 and slow_disk.sharded.swap_ins == 0
    assert slow_disk.shards_win
    long = compared(tmp_path / "long", tokens=4000, rules=40, load_ms=200.0, slots=10)
    assert not long.shards_win, "four prefills of 4,000 tokens against a few copies"


def test_a_shard_computes_the_conversation_for_its_own_rules(tmp_path: Path) -> None:
    result = compared(tmp_path, tokens=100, rules=16, load_ms=0.0, slots=8)
    # Two shards: both read the conversation, each the suffixes of its rules.
    assert result.sharded.shards == 2
    assert result.sharded.device_ms == pytest.approx(2 * 100 + 8 * 3, rel=0.05)
    one = result.swapping
    assert one.device_ms == pytest.approx(100 + 8 * 3 + 4 * one.swap_ins, rel=0.05)
