"""A step that fails or gives a NaN logit: nobody gets a wrong answer, and everybody an answer or a
refusal.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.engine import GuardEngine
from serve.engine.backend import EngineOutput
from tests.serve.cards import RULE_TEXTS
from tests.serve.engine.shared import runner
from tests.serve.guarded import CONVERSATION, adapter_folders, peft_logit

pytestmark = pytest.mark.slow

NATS = 2e-3  # float32: two ways to compute the same logit


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_batch_that_fails_after_it_was_scheduled_leaves_no_blocks_behind(
    engine: GuardEngine, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    messages = (Message("user", "it was never computed " * 40),)
    with monkeypatch.context() as patch:
        patch.setattr(runner(engine).model, "forward", fail)
        with pytest.raises(type(failure)):
            engine.check(messages)
    again = engine.check(messages)
    assert engine.is_usable and not again.refused
    for verdict in again.verdicts:
        expected = peft_logit(messages, RULE_TEXTS[verdict.rule], adapter_folders()[verdict.rule])
        assert verdict.logit == pytest.approx(expected, abs=NATS)


def test_checks_of_others_in_a_batch_that_fails_have_no_result(
    engine: GuardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = engine.open_check(CONVERSATION[:1])
    with monkeypatch.context() as patch:
        patch.setattr(runner(engine).model, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.check(CONVERSATION)
    assert other.call.done
    with pytest.raises(GuardError, match="their batch failed"):
        other.result()


def test_an_engine_that_could_not_be_cleared_answers_nothing_any_more(
    engine: GuardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner(engine).model, "forward", fail)
        patch.setattr(engine.backend, "scrub", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.check(CONVERSATION)
    with pytest.raises(GuardError, match=r"could not be cleared.*Start it again"):
        engine.check(CONVERSATION)
    engine.forget()
    engine._dispatcher.is_usable = True  # it was cleared now, and other tests use it


def no_number(engine: GuardEngine, request_id: str) -> Any:
    """A step of vLLM in which this request's answer is not a number, and there is no other."""

    def step() -> list[EngineOutput]:
        engine.backend.cancel([request_id])
        return [EngineOutput(request_id, math.nan, 0, 100)]

    return step


def test_an_answer_that_is_no_number_once_and_what_is_in_flight_beside_it_begin_again(
    engine: GuardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = ["plain", "pii_leak"]
    expected = engine.check(CONVERSATION, rules)
    under_way = engine.open_check(CONVERSATION, rules)
    before, clock = list(under_way.call.waiting), engine._dispatcher.virtual_time
    tokens = sum(request.own_tokens for request in engine._dispatcher.in_flight.values())
    with monkeypatch.context() as patch:
        patch.setattr(engine.backend, "step", no_number(engine, before[0]))
        engine.step()
    assert len(under_way.call.waiting) == 2 and not set(before) & set(under_way.call.waiting)
    while not under_way.call.done:
        engine.step()
    # Each is counted once, however often it has begun.
    assert engine._dispatcher.virtual_time == clock + tokens
    check = under_way.result()
    assert not check.refused
    assert [verdict.logit for verdict in check.verdicts] == pytest.approx(
        [verdict.logit for verdict in expected.verdicts], abs=NATS
    )


def test_answers_that_stay_no_numbers_end_in_refusals(
    engine: GuardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whichever request: nothing begins again for ever."""
    under_way = engine.open_check(CONVERSATION)
    for _ in range(4):
        with monkeypatch.context() as patch:
            first = next(iter(under_way.call.waiting))
            patch.setattr(engine.backend, "step", no_number(engine, first))
            engine.step()
    assert under_way.call.done
    # None was at fault twice.
    assert {refusal.subject for refusal in under_way.result().refused.values()} == {"batch"}
    assert len(engine.check(CONVERSATION, ["plain"]).verdicts) == 1


def test_a_rule_that_gives_no_number_time_and_again_is_refused_and_those_beside_it_are_answered(
    engine: GuardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = engine.open_check(CONVERSATION, ["plain", "pii_leak"])
    for times in (1, 2, 3):
        by_index: dict[int, str] = {}
        for request_id, in_flight in under_way.call.waiting.items():
            by_index[in_flight.recipients[0].call_index] = request_id
        with monkeypatch.context() as patch:
            patch.setattr(engine.backend, "step", no_number(engine, by_index[0]))
            engine.step()
        assert (under_way.call.outcomes[0] is None) == (times < 3)
    while not under_way.call.done:
        engine.step()
    check = under_way.result()
    assert {rule: refusal.subject for rule, refusal in check.refused.items()} == {
        "plain": "verdict"
    }
    assert [verdict.rule for verdict in check.verdicts] == ["pii_leak"]


def test_what_vllm_refuses_when_it_begins_again_is_refused_alone(
    engine: GuardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = engine.open_check(CONVERSATION, ["plain", "pii_leak", "medical_advice"])
    submit, calls = engine.backend.submit, []

    def refuse_the_first(*arguments: Any, **options: Any) -> str:
        calls.append(arguments)
        if len(calls) == 1:
            raise GuardError("the adapter's files have changed")
        return submit(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(engine.backend, "step", no_number(engine, next(iter(under_way.call.waiting))))
        patch.setattr(engine.backend, "submit", refuse_the_first)
        engine.step()
    while not under_way.call.done:
        engine.step()
    check = under_way.result()
    assert {rule: refusal.subject for rule, refusal in check.refused.items()} == {
        "pii_leak": "rule 'pii_leak'"
    }
    assert [verdict.rule for verdict in check.verdicts] == ["plain", "medical_advice"]
