"""A benchmark goes on with scores only."""

from __future__ import annotations

import pytest

from guard.errors import GuardError
from serve.bench.scores import judged, scores_of, scores_of_calls
from serve.engine import Call, Check, Refusal, Score

SCORE = Score(0.5, 0, 10, 1.0)


def test_scores_come_through_and_a_refusal_is_an_error() -> None:
    assert scores_of([SCORE, SCORE], where="here") == [SCORE, SCORE]
    with pytest.raises(GuardError, match=r"here: a benchmark request was refused \(got rule: no\)"):
        scores_of([SCORE, Refusal("rule", "no", "nan")], where="here")


def test_the_scores_of_several_calls_are_in_order() -> None:
    second = Score(1.5, 0, 10, 1.0)
    assert scores_of_calls([Call([SCORE]), Call([second, SCORE])], "here") == [SCORE, second, SCORE]


def test_a_check_of_which_a_rule_was_refused_is_an_error() -> None:
    whole = Check((), {}, cached_tokens=0, computed_tokens=10, wall_ms=1.0)
    assert judged(whole, "here") is whole
    refused = Check((), {"rule": Refusal("rule", "no", "nan")}, 0, 10, 1.0)
    with pytest.raises(GuardError, match=r"here: a benchmark request was refused \(got rule: no\)"):
        judged(refused, "here")
