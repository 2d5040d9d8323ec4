"""Checks in an engine of toy steps: each caller has its own answer, or why there is none."""

from __future__ import annotations

import time

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.engine.refusals import TooLate
from serve.engine.thread.open_checks import OpenChecks
from serve.engine.thread.pending import PendingCheck
from tests.serve.toy_engine import ToyEngine


def asked(*rules: str, content: str = "Hello.") -> PendingCheck:
    deadline = time.monotonic() + 60.0
    return PendingCheck((Message("user", content),), rules, None, deadline)


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine()


@pytest.fixture
def checks(engine: ToyEngine) -> OpenChecks:
    return OpenChecks(engine)  # type: ignore[arg-type]


def test_those_that_are_done_are_answered_and_the_others_stay(
    engine: ToyEngine, checks: OpenChecks
) -> None:
    short, long = asked("one"), asked("one", "two")
    for pending in (short, long):
        checks.open(pending)
    assert (len(checks), checks.settle()) == (2, 0)
    engine.step()
    assert checks.settle() == 1 and list(short.future.result(0).refused) == ["one"]
    assert not long.future.done() and checks.is_work_left
    engine.step()
    assert not checks.is_work_left and checks.settle() == 1 and len(checks) == 0
    assert list(long.future.result(0).refused) == ["one", "two"]


def test_one_that_cannot_be_opened_says_why_and_holds_nothing(checks: OpenChecks) -> None:
    broken = asked("one", content="breaks")
    checks.open(broken)
    with pytest.raises(GuardError, match="the check broke"):
        broken.future.result(0)
    assert len(checks) == 0


def test_what_is_too_late_is_ended_and_its_work_is_taken_out_of_the_engine(
    engine: ToyEngine, checks: OpenChecks
) -> None:
    late, wanted = asked("one", "two"), asked("one", "two")
    for pending in (late, wanted):
        checks.open(pending)
    late.deadline = time.monotonic() - 1.0
    checks.drop()
    with pytest.raises(TooLate):
        late.future.result(0)
    assert len(checks) == 1 and len(engine.open) == 1 and not wanted.future.done()


def test_a_failed_batch_fails_all_and_clears_the_engine(
    engine: ToyEngine, checks: OpenChecks
) -> None:
    both = asked("one"), asked("two")
    for pending in both:
        checks.open(pending)
    checks.fail_batch(RuntimeError("no device"))
    for pending in both:
        with pytest.raises(GuardError, match="the engine failed: no device"):
            pending.future.result(0)
    assert len(checks) == 0 and engine.open == []


def test_a_dead_engine_is_asked_nothing(
    engine: ToyEngine, checks: OpenChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = asked("one")
    checks.open(pending)
    monkeypatch.delattr(ToyEngine, "cancel")
    checks.fail(GuardError("it is dead"))
    with pytest.raises(GuardError, match="it is dead"):
        pending.future.result(0)
