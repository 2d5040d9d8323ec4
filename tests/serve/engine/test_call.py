"""A call's outcomes: what settles them, and when they are given."""

from __future__ import annotations

import math

import pytest

from guard.errors import GuardError
from guard.verdict import Calibration
from serve.engine import Call, OpenCheck, Refusal, Score
from serve.engine.backend import BackendRequest, EngineOutput
from serve.engine.call import InFlight, Recipient


def waiting_call() -> Call:
    """A call of one request, which is in flight as "1"."""
    call = Call([None])
    call.waiting["1"] = InFlight(call, (Recipient(0, "rule 'a'"),), BackendRequest([], [1]), 1, 0.0)
    return call


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_no_number_is_a_refusal(logit: float) -> None:
    asked = waiting_call()
    asked.settle(EngineOutput("1", logit, 0, 10), [logit])
    assert asked.done and isinstance(asked.results()[0], Refusal)


def test_results_are_not_given_before_all_are_there() -> None:
    with pytest.raises(GuardError, match="in flight"):
        waiting_call().results()


def test_several_heads_on_one_output_count_its_tokens_once() -> None:
    call = Call([None] * 3)
    recipients = tuple(Recipient(index, f"rule {index}") for index in (2, 0, 1))
    call.waiting["1"] = InFlight(call, recipients, BackendRequest([], [1] * 30), 30, 0.0)
    call.settle(EngineOutput("1", 1.5, 20, 10), [1.5] * 3)
    scores = [outcome for outcome in call.results() if isinstance(outcome, Score)]
    counted = [(score.cached_tokens, score.computed_tokens) for score in scores]
    assert counted == [(30, 0), (30, 0), (20, 10)]


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
