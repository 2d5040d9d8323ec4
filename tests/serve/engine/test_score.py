"""The values that the engine answers with."""

from __future__ import annotations

import dataclasses

import pytest

from guard.verdict import Calibration
from serve.engine import Refusal
from serve.engine.score import Check


def test_a_violation_outweighs_a_refusal_and_a_refusal_outweighs_an_allow() -> None:
    allow, violation = (Calibration().verdict("rule", logit) for logit in (-5.0, 5.0))
    refused = {"other": Refusal("other", "no")}
    assert Check((allow, violation), refused, 0, 0, 0.0).outcome == "violation"
    assert Check((allow,), refused, 0, 0, 0.0).outcome == "unjudged"
    assert Check((allow,), {}, 0, 0, 0.0).outcome == "allow"


def test_a_check_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Check((), {}, 0, 0, 0.0).wall_ms = 1.0  # type: ignore[misc]
