"""What a response's body says, as values."""

from __future__ import annotations

from typing import Any

import pytest

from serve.client.answers import CheckAnswer, CheckFailed, NotAllowed, RuleExplanation, RuleUnjudged

PROBABLE = {"p_violation": 0.9, "threshold": 0.5, "confident": True}
BODY: dict[str, Any] = {
    "verdict": "unjudged",
    "decided_by": ["fine"],
    "results": [{"rule": "fine", "verdict": "violation", **PROBABLE}],
    "unjudged": [{"rule": "long", "code": "too_long", "reason": "it does not fit"}],
    "usage": {"cached_tokens": 7, "computed_tokens": 3},
    "latency_ms": 1.5,
}


def test_everything_of_a_check_is_there() -> None:
    answer = CheckAnswer.of(BODY)
    assert answer.results["fine"].violates and answer.results["fine"].confident
    assert answer.unjudged == {"long": RuleUnjudged("too_long", "it does not fit")}
    assert not answer.is_allowed
    assert (answer.cached_tokens, answer.computed_tokens, answer.latency_ms) == (7, 3, 1.5)
    assert not answer.explanations
    assert str(NotAllowed(answer)) == "unjudged: fine"


@pytest.mark.parametrize("missing", list(BODY))
def test_a_body_that_lacks_something_is_no_answer(missing: str) -> None:
    with pytest.raises(CheckFailed, match=missing):
        CheckAnswer.of({key: value for key, value in BODY.items() if key != missing})


@pytest.mark.parametrize("explanations", [None, [], {"fine": None}, {"fine": {"turn": 0}}])
def test_explanations_that_are_none_are_no_answer(explanations: object) -> None:
    with pytest.raises(CheckFailed, match="no check of this version"):
        CheckAnswer.of({**BODY, "explanations": explanations})


def test_an_explanation_of_a_first_turn_has_nothing_before_it() -> None:
    explanations = {"fine": {"turn": 0, "p_after": 0.9}}
    answer = CheckAnswer.of({**BODY, "explanations": explanations})
    assert answer.explanations == {"fine": RuleExplanation(0, None, 0.9)}
