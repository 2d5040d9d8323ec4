"""What is known of a check when it is over."""

from __future__ import annotations

from tests.serve.api.observe.toy_record import record


def test_a_check_without_an_answer_is_unjudged() -> None:
    assert record().verdict == "violation"
    assert record(failure="engine_failed").verdict == "unjudged"
