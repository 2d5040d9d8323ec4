"""After a failed step or a NaN logit nobody has a wrong answer, and everybody one or none."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pytest import MonkeyPatch

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.engine import GuardEngine
from serve.engine.backend import EngineOutput
from tests.serve.engine.shared import NATS, assert_peft, finish, logits_of, runner
from tests.serve.guarded import CONVERSATION

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_batch_that_fails_after_it_was_scheduled_leaves_no_blocks_behind(
    engine: GuardEngine, monkeypatch: MonkeyPatch, failure: BaseException
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    messages = (Message("user", "it was never computed " * 40),)
    with monkeypatch.context() as patch:
        patch.setattr(runner(engine).model, "forward", fail)
        with pytest.raises(type(failure)):
            engine.check(messages)
    assert engine.is_usable
    assert_peft(engine, messages=messages)


def test_others_in_a_failed_batch_have_none(engine: GuardEngine, monkeypatch: MonkeyPatch) -> None:
    other = engine.open_check(CONVERSATION[:1])
    with monkeypatch.context() as patch:
        patch.setattr(runner(engine).model, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.check(CONVERSATION)
    assert other.call.done
    with pytest.raises(GuardError, match="their batch failed"):
        other.result()


def test_an_engine_that_could_not_be_cleared_answers_nothing_any_more(
    engine: GuardEngine, monkeypatch: MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(runner(engine).model, "forward", lambda *_, **__: 1 / 0)
        patch.setattr(engine.backend, "scrub", lambda: [][0])
        with pytest.raises(IndexError):
            engine.check(CONVERSATION)
    with pytest.raises(GuardError, match=r"could not be cleared.*Start it again"):
        engine.check(CONVERSATION)
    engine.forget()
    engine._dispatcher.is_usable = True  # it was cleared now, and other tests use it


def step_without_number(
    engine: GuardEngine, monkeypatch: MonkeyPatch, request_id: str, **patched: Any
) -> None:
    """A step in which this request's answer is not a number, and there is no other."""

    def step() -> list[EngineOutput]:
        engine.backend.cancel([request_id])
        return [EngineOutput(request_id, math.nan, 0, 100)]

    with monkeypatch.context() as patch:
        for name, value in {"step": step, **patched}.items():
            patch.setattr(engine.backend, name, value)
        engine.step()


def test_an_answer_that_is_no_number_once_and_what_is_in_flight_beside_it_begin_again(
    engine: GuardEngine, monkeypatch: MonkeyPatch
) -> None:
    rules = ["plain", "pii_leak"]
    expected = engine.check(CONVERSATION, rules)
    under_way = engine.open_check(CONVERSATION, rules)
    before, clock = list(under_way.call.waiting), engine._dispatcher.virtual_time
    tokens = sum(request.own_tokens for request in engine._dispatcher.in_flight.values())
    step_without_number(engine, monkeypatch, before[0])
    assert len(under_way.call.waiting) == 2 and not set(before) & set(under_way.call.waiting)
    finish(engine, under_way.call)
    # Each is counted once, however often it has begun.
    assert engine._dispatcher.virtual_time == clock + tokens
    check = under_way.result()
    assert not check.refused
    assert logits_of(check) == pytest.approx(logits_of(expected), abs=NATS)


def test_answers_that_stay_nan_are_refusals(engine: GuardEngine, monkeypatch: MonkeyPatch) -> None:
    """Of whichever request: nothing begins again for ever."""
    under_way = engine.open_check(CONVERSATION)
    for _ in range(4):
        step_without_number(engine, monkeypatch, next(iter(under_way.call.waiting)))
    assert under_way.call.done
    # None was at fault twice.
    assert {refusal.subject for refusal in under_way.result().refused.values()} == {"batch"}
    assert len(engine.check(CONVERSATION, ["plain"]).verdicts) == 1


def test_a_rule_that_gives_no_number_time_and_again_is_refused_and_those_beside_it_are_answered(
    engine: GuardEngine, monkeypatch: MonkeyPatch
) -> None:
    under_way = engine.open_check(CONVERSATION, ["plain", "pii_leak"])
    for times in (1, 2, 3):
        by_index: dict[int, str] = {}
        for request_id, in_flight in under_way.call.waiting.items():
            by_index[in_flight.recipients[0].call_index] = request_id
        step_without_number(engine, monkeypatch, by_index[0])
        assert (under_way.call.outcomes[0] is None) == (times < 3)
    finish(engine, under_way.call)
    check = under_way.result()
    assert list(check.refused) == ["plain"] and check.refused["plain"].subject == "verdict"
    assert [verdict.rule for verdict in check.verdicts] == ["pii_leak"]


def test_what_vllm_refuses_at_a_second_try_is_refused_alone(
    engine: GuardEngine, monkeypatch: MonkeyPatch
) -> None:
    under_way = engine.open_check(CONVERSATION, ["plain", "pii_leak", "medical_advice"])
    submit, calls = engine.backend.submit, []

    def refuse_the_first(*arguments: Any, **options: Any) -> str:
        calls.append(arguments)
        if len(calls) == 1:
            raise GuardError("the adapter's files have changed")
        return submit(*arguments, **options)

    first = next(iter(under_way.call.waiting))
    step_without_number(engine, monkeypatch, first, submit=refuse_the_first)
    finish(engine, under_way.call)
    check = under_way.result()
    assert list(check.refused) == ["pii_leak"]
    assert check.refused["pii_leak"].subject == "rule 'pii_leak'"
    assert [verdict.rule for verdict in check.verdicts] == ["plain", "medical_advice"]
