from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from guard.errors import GuardError
from serve.plan.device import DEVICES, load_device
from serve.plan.plan_file import PLANS, load_plan


def test_every_plan_and_device_loads() -> None:
    for path in PLANS.glob("*.yaml"):
        assert load_plan(path.stem, {}).name == path.stem
    for path in DEVICES.glob("*.yaml"):
        assert load_device(path.stem).peak_tflops


def test_options_stand_in_the_place_of_keys() -> None:
    options = {"traffic.rate": 7.0, "traffic.rules_a_check": [2, 3], "p95_ms": 90.0}
    plan = load_plan("tiny_here", options)
    assert (plan.traffic.rate, plan.traffic.rules_a_check, plan.p95_ms) == (7.0, (2, 3), 90.0)
    assert plan.traffic.lengths == load_plan("tiny_here", {}).traffic.lengths


def test_a_file_anywhere_is_a_plan_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nprice_an_hour: 1\n", encoding="utf-8")
    assert load_plan(str(path), {}).price_an_hour == 1
    with pytest.raises(GuardError, match=r"missing key 'judge.output'"):
        load_plan(str(path), {"judge.input": 1.0})


def test_a_trace_has_its_own_rate_unless_the_plan_or_an_option_beside_it_gives_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.yaml"

    def given(traffic: str, options: dict[str, Any]) -> set[str]:
        path.write_text(f"name: mine\ntraffic: {traffic}\n", encoding="utf-8")
        return load_plan(str(path), options).traffic.model_fields_set

    trace = {"traffic.trace": "checks.jsonl"}
    assert given("{trace: checks.jsonl}", {"seed": 1, "traffic.turns": 2.0}) == {"trace", "turns"}
    assert given("{trace: checks.jsonl, rate: 7}", {"seed": 1}) == {"trace", "rate"}
    assert given("{rate: 7}", trace) == {"trace"}
    assert given("{rate: 7}", trace | {"traffic.rate": 9.0}) == {"trace", "rate"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"traffic.rate": 0.0}, "'traffic.rate'.*greater than 0.*got 0"),
        ({"traffic.rules_a_check": [5, 2]}, "least and most, of the 100 rules"),
        ({"traffic.lengths": [300, 100]}, "quantiles.*rising"),
        ({"traffic.turns": 0.5}, "'traffic.turns'"),
        ({"checks": 10_000_000}, "'checks'"),
        ({"seed": -1}, "'seed'.*greater than or equal to 0, got -1"),
        ({"traffic.rate": math.inf}, "'traffic.rate'.*finite number"),
        ({"traffic.zipf": math.nan}, "'traffic.zipf'"),
        ({"judge.input": math.inf}, "'judge.input'.*finite number"),
        ({"p95_ms.most": 1}, "no such section.*got p95_ms.most"),
        ({"trafic.rate": 1.0}, "unknown key 'trafic'. Did you mean 'traffic'"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(GuardError, match=words):
        load_plan("tiny_here", options)
