"""What is known of a check when it is over, and the word for why it has no answer."""

from __future__ import annotations

import asyncio

import pytest

from guard.errors import GuardError
from serve.api.observe.record import failure_of
from serve.engine.refusals import CallerGone, Overloaded, too_late
from tests.serve.api.observe.toy_record import record


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (too_late(), "too_late"),
        (Overloaded("full"), "overloaded"),
        (CallerGone("gone"), "caller_gone"),
        (asyncio.CancelledError(), "caller_gone"),
        (GuardError("the engine failed"), "failed"),
        (ZeroDivisionError(), "failed"),
    ],
)
def test_every_error_has_a_word(error: BaseException, word: str) -> None:
    assert failure_of(error) == word


def test_a_check_without_an_answer_is_unjudged() -> None:
    assert record().verdict == "violation"
    assert record(failure="failed").verdict == "unjudged"
