from __future__ import annotations

import math
from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.plan.plan_file import PLANS, load_plan


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_plan_loads_under_its_name(path: Path) -> None:
    assert load_plan(path.stem, {}).name == path.stem


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


def test_an_option_states_no_rate_for_a_trace_that_the_file_names_without_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ntraffic: {trace: checks.jsonl}\n", encoding="utf-8")
    traffic = load_plan(str(path), {"seed": 1, "traffic.turns": 2.0}).traffic
    assert traffic.model_fields_set == {"trace", "turns"}
    path.write_text("name: mine\n", encoding="utf-8")
    assert load_plan(str(path), {"traffic.turns": 2.0}).traffic.model_fields_set == {"turns"}


def test_a_trace_that_is_an_option_has_its_own_rate_unless_one_is_given(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ntraffic: {rate: 7}\n", encoding="utf-8")
    trace = {"traffic.trace": "checks.jsonl"}
    assert "rate" not in load_plan(str(path), trace).traffic.model_fields_set
    stated = load_plan(str(path), trace | {"traffic.rate": 9.0}).traffic
    assert "rate" in stated.model_fields_set and stated.rate == 9.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"traffic.rate": 0.0}, "'traffic.rate'.*greater than 0.*got 0"),
        ({"traffic.rules_a_check": [5, 2]}, "least and most, of the 100 rules"),
        ({"traffic.rules": 10}, r"of the 10 rules \(got 5, 20\)"),
        ({"traffic.lengths": [300, 100]}, "quantiles.*rising"),
        ({"traffic.turns": 0.5}, "'traffic.turns'"),
        ({"methods": ["head"]}, "no adapter method 'head'.*Known: lora, alora"),
        ({"p95_ms": -1.0}, "'p95_ms'"),
        ({"rank": 0}, "'rank'"),
        ({"checks": 10_000_000}, "'checks'"),
        ({"seed": -1}, "'seed'.*greater than or equal to 0, got -1"),
        ({"traffic.rate": math.inf}, "'traffic.rate'.*finite number"),
        ({"traffic.think_s": math.inf}, "'traffic.think_s'.*finite number"),
        ({"traffic.zipf": math.nan}, "'traffic.zipf'"),
        ({"price_an_hour": math.inf}, "'price_an_hour'.*finite number"),
        ({"judge.input": math.inf}, "'judge.input'.*finite number"),
        ({"memory_gib": math.inf}, "'memory_gib'.*finite number"),
        ({"p95_ms.most": 1}, "no such section.*got p95_ms.most"),
        ({"trafic.rate": 1.0}, "unknown key 'trafic'. Did you mean 'traffic'"),
        ({"rat": 1.0}, "unknown key 'rat'"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(GuardError, match=words):
        load_plan("tiny_here", options)


def test_an_unknown_plan_names_the_known_ones() -> None:
    with pytest.raises(GuardError, match="Did you mean 'tiny_here'"):
        load_plan("tiny_her", {})
