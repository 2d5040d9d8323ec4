"""The values that the engine answers with."""

from __future__ import annotations

import dataclasses

import pytest

from guard.verdict import Calibration
from serve.engine import Refusal
from serve.engine.score import Check, joined


def test_a_violation_outweighs_a_refusal_and_a_refusal_outweighs_an_allow() -> None:
    allow, violation = (Calibration().verdict("rule", logit) for logit in (-5.0, 5.0))
    refused = {"other": Refusal("other", "no", "nan")}
    assert Check((allow, violation), refused, 0, 0, 0.0).outcome == "violation"
    assert Check((allow,), refused, 0, 0, 0.0).outcome == "unjudged"
    check = Check((allow,), {}, 0, 0, 0.0)
    assert check.outcome == "allow"
    with pytest.raises(dataclasses.FrozenInstanceError):
        check.verdicts = ()  # type: ignore[misc]


def test_checks_by_different_rules_are_one_in_the_order_of_the_rules() -> None:
    allow, violation = Calibration().verdict("a", -5.0), Calibration().verdict("c", 5.0)
    first = Check((allow,), {"d": Refusal("d", "no", "nan")}, 3, 2, 7.0, {"a": "12"}, {"a": 1.0})
    second = Check(
        (violation,), {"b": Refusal("b", "no", "nan")}, 30, 20, 5.0, {"c": "34"}, {"c": 2.0}
    )
    check = joined(("d", "c", "b", "a"), (first, second))
    assert [verdict.rule for verdict in check.verdicts] == ["c", "a"]
    assert list(check.refused) == ["d", "b"]
    assert (check.cached_tokens, check.computed_tokens, check.wall_ms) == (33, 22, 7.0)
    assert check.versions == {"a": "12", "c": "34"} and check.latencies_ms == {"a": 1.0, "c": 2.0}
