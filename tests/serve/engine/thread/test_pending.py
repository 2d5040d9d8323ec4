"""A check that waits for the engine knows when it is not worth any work."""

from __future__ import annotations

import time

from guard.conversation.example import Message
from serve.engine.refusals import CallerGone, TooLate
from serve.engine.thread.pending import PendingCheck


def pending_check(seconds_left: float) -> PendingCheck:
    return PendingCheck((Message("user", "Hello"),), None, None, time.monotonic() + seconds_left)


def test_a_check_whose_caller_waits_and_whose_deadline_is_ahead_is_worth_its_work() -> None:
    assert pending_check(seconds_left=60).failure() is None


def test_a_check_that_is_too_late_is_not() -> None:
    assert isinstance(pending_check(seconds_left=-1).failure(), TooLate)


def test_a_check_that_nobody_waits_for_is_not_even_if_it_is_too_late_too() -> None:
    pending = pending_check(seconds_left=-1)
    pending.is_given_up = True
    assert isinstance(pending.failure(), CallerGone)


def test_every_check_has_an_answer_of_its_own() -> None:
    assert pending_check(60).future is not pending_check(60).future
