"""A call's outcomes: what settles them, and when they are given."""

from __future__ import annotations

import math

import pytest

from guard.verdict import Calibration
from serve.engine import Call, OpenCheck, Refusal, Score
from serve.engine.backend import BackendRequest, EngineOutput
from serve.engine.call import InFlight, Recipient


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_no_number_is_a_refusal(logit: float) -> None:
    asked = Call([None])
    recipients = (Recipient(0, "rule 'a'"),)
    asked.waiting["1"] = InFlight(asked, recipients, BackendRequest([], [1]), 1, 0.0)
    asked.settle(EngineOutput("1", logit, 0, 10), [logit])
    assert asked.done and isinstance(asked.results()[0], Refusal)


def test_what_the_backend_refuses_is_internal_and_what_a_conversation_is_is_not() -> None:
    call = Call([None, None])
    in_flight = InFlight(call, (Recipient(0, "rule 'a'"),), BackendRequest([], [1]), 1, 0.0)
    in_flight.refuse("runs/tiny/a: no such file", "weights_unavailable")
    call.refuse(1, "rule 'b'", "the prompt does not fit the context", "too_long")
    assert call.results() == [
        Refusal("rule 'a'", "runs/tiny/a: no such file", "weights_unavailable", is_internal=True),
        Refusal("rule 'b'", "the prompt does not fit the context", "too_long"),
    ]


def test_what_no_rule_reads_is_one_reason_for_all_rules() -> None:
    rules = tuple(f"rule {number}" for number in range(100))
    call = Call([Score(-5.0, 0, 10, 1.0)] * len(rules))
    calibrations = dict.fromkeys(rules, Calibration(threshold=0.25, uncertainty_band=(0.2, 0.3)))
    unread = ("message 0 has an image", "message 1 has a sound")
    refused = OpenCheck(rules, calibrations, call, unread=unread).result().refused
    assert list(refused) == list(rules)
    assert refused["rule 0"].why == "message 0 has an image, which no rule reads"
    assert all(refusal is refused["rule 0"] for refusal in refused.values())
