"""Who is answered when, on the real vLLM: nobody waits for ever. After a failed step or a NaN logit
nobody has a wrong answer, and everybody one or none.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pytest import MonkeyPatch
from vllm_alora.kv.followers import groups_of

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.engine import Call, GuardEngine, ScoreRequest
from serve.engine.backend import BackendRequest, EngineOutput
from serve.engine.backends import decoder
from serve.engine.plan import FairQueue
from tests.serve.cards import RULE_TEXTS, prompts
from tests.serve.engine import shared
from tests.serve.guarded import CONVERSATION

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_batch_that_fails_after_it_was_scheduled_leaves_no_blocks_behind(
    engine: GuardEngine, monkeypatch: MonkeyPatch, failure: BaseException
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    messages = (Message("user", "it was never computed " * 40),)
    beside = engine.open_check(CONVERSATION[:1])
    with monkeypatch.context() as patch:
        patch.setattr(shared.runner(engine).model, "forward", fail)
        with pytest.raises(type(failure)):
            engine.check(messages)
    assert engine.is_usable and beside.call.done
    with pytest.raises(GuardError, match="their batch failed"):
        beside.result()
    shared.assert_peft(engine, messages=messages)


def test_what_was_not_cleared_answers_no_more(
    engine: GuardEngine, monkeypatch: MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shared.runner(engine).model, "forward", lambda *_, **__: 1 / 0)
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


def test_after_one_nan_all_begin_again(engine: GuardEngine, monkeypatch: MonkeyPatch) -> None:
    rules = ["plain", "pii_leak"]
    expected = engine.check(CONVERSATION, rules)
    under_way = engine.open_check(CONVERSATION, rules)
    before, clock = list(under_way.call.waiting), engine._dispatcher.virtual_time
    tokens = sum(request.own_tokens for request in engine._dispatcher.in_flight.values())
    step_without_number(engine, monkeypatch, before[0])
    assert len(under_way.call.waiting) == 2 and not set(before) & set(under_way.call.waiting)
    shared.finish(engine, under_way.call)
    # Each is counted once, however often it has begun.
    assert engine._dispatcher.virtual_time == clock + tokens
    check = under_way.result()
    assert not check.refused
    assert shared.logits_of(check) == pytest.approx(shared.logits_of(expected), abs=shared.NATS)


def test_answers_that_stay_nan_are_refusals(engine: GuardEngine, monkeypatch: MonkeyPatch) -> None:
    """Of whichever request: nothing begins again for ever."""
    under_way = engine.open_check(CONVERSATION)
    for _ in range(4):
        step_without_number(engine, monkeypatch, next(iter(under_way.call.waiting)))
    assert under_way.call.done
    # None was at fault twice.
    assert {refusal.subject for refusal in under_way.result().refused.values()} == {"batch"}
    assert len(engine.check(CONVERSATION, ["plain"]).verdicts) == 1


def test_a_rule_of_nan_alone_is_refused(engine: GuardEngine, monkeypatch: MonkeyPatch) -> None:
    under_way = engine.open_check(CONVERSATION, ["plain", "pii_leak"])
    for times in (1, 2, 3):
        by_index: dict[int, str] = {}
        for request_id, in_flight in under_way.call.waiting.items():
            by_index[in_flight.recipients[0].call_index] = request_id
        step_without_number(engine, monkeypatch, by_index[0])
        assert (under_way.call.outcomes[0] is None) == (times < 3)
    shared.finish(engine, under_way.call)
    check = under_way.result()
    assert list(check.refused) == ["plain"] and check.refused["plain"].subject == "verdict"
    assert [verdict.rule for verdict in check.verdicts] == ["pii_leak"]


def test_what_vllm_refuses_later_is_alone(engine: GuardEngine, monkeypatch: MonkeyPatch) -> None:
    under_way = engine.open_check(CONVERSATION, ["plain", "pii_leak", "medical_advice"])
    submit, calls = engine.backend.submit, []

    def refuse_the_first(*arguments: Any, **options: Any) -> str:
        calls.append(arguments)
        if len(calls) == 1:
            raise GuardError("the adapter's files have changed")
        return submit(*arguments, **options)

    first = next(iter(under_way.call.waiting))
    step_without_number(engine, monkeypatch, first, submit=refuse_the_first)
    shared.finish(engine, under_way.call)
    check = under_way.result()
    assert list(check.refused) == ["pii_leak"]
    assert check.refused["pii_leak"].subject == "rule 'pii_leak'"
    assert [verdict.rule for verdict in check.verdicts] == ["plain", "medical_advice"]


@pytest.mark.parametrize("when", ["before it was queued", "after it was queued"])
def test_requests_that_were_queued_before_an_error_are_not_left_behind(
    engine: GuardEngine, monkeypatch: MonkeyPatch, when: str
) -> None:
    core, calls = shared.core_of(engine), []

    def stumbling(queue: Callable[..., Any]) -> Callable[..., Any]:
        def stumble(*arguments: Any, **named: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 3 and when.startswith("before"):
                raise FileNotFoundError("gone")
            found = queue(*arguments, **named)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return found

        return stumble

    with monkeypatch.context() as patch:
        patch.setattr(core, "add_request", stumbling(core.add_request))
        patch.setattr(decoder, "follow", stumbling(decoder.follow))
        with pytest.raises((FileNotFoundError, KeyboardInterrupt)):
            engine.check(CONVERSATION)
    assert not groups_of(core.scheduler)
    assert not core.scheduler.has_unfinished_requests()
    assert not engine._dispatcher.in_flight


def test_after_an_unsampled_step_the_next_runs(
    engine: GuardEngine, monkeypatch: MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shared.runner(engine), "sample_tokens", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.check(CONVERSATION)
        assert shared.runner(engine).execute_model_state is None
    shared.assert_peft(engine)


def test_both_of_vllm_s_runners_keep_an_unsampled_step_in_one_attribute() -> None:
    """A name that they do not have would be set, and nothing forgotten."""
    for module in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"):
        source = inspect.getsource(importlib.import_module(module).GPUModelRunner.sample_tokens)
        assert "if self.execute_model_state is None:" in source


def test_only_a_request_on_the_same_conversation_may_follow_the_one_before(
    engine: GuardEngine, monkeypatch: MonkeyPatch
) -> None:
    before, leader = BackendRequest([1, 2], [3], None, 2, 0, "salt"), object()
    backend: Any = engine.backend
    monkeypatch.setattr(backend, "_last_queued", (before, leader))
    assert backend._leader_of(before._replace(suffix=[7], wants_state=True)) is leader
    # Equal tokens may be another conversation's.
    for changed in ({"prefix": [1, 2]}, {"cache_salt": "another's"}, {"virtual_start": 5}):
        assert backend._leader_of(before._replace(**changed)) is None


Conversation = tuple[Message, ...]


def asked_of(messages: Conversation, name: str = "plain", salt: str | None = None) -> ScoreRequest:
    return ScoreRequest(messages, RULE_TEXTS[name], name, salt)


def numbered(number: int, words: int = 0) -> Conversation:
    """A conversation that no other begins with."""
    return (Message("user", f"Number {number}. {'word ' * words}"),)


@pytest.fixture
def short_turns(engine: GuardEngine, monkeypatch: MonkeyPatch) -> GuardEngine:
    """The shared engine, taking turns after every few requests."""
    monkeypatch.setattr(engine.backend, "step_tokens", 64)
    return engine


def test_a_conversation_comes_in_one_turn_until_its_own_tokens_fill_a_quantum() -> None:
    queue = FairQueue(now=1000, quantum=100)
    starts = [queue.next("a", tokens=90, shared_tokens=60) for _ in range(8)]
    assert starts == [(1000, 90), *[(1000, 30)] * 3, *[(1100, 30)] * 3, (1200, 30)]
    queue = FairQueue(now=7, quantum=100)  # what shares nothing comes a quantum after a quantum
    assert [queue.next("a", 60, 0) for _ in range(4)] == [(7, 60), (7, 60), (107, 60), (107, 60)]


def test_a_rule_behind_a_long_call_is_answered_before_its_end(short_turns: GuardEngine) -> None:
    """Before the first batch or between batches; and the long call goes on in its turn."""
    long = short_turns.submit([asked_of(CONVERSATION)] * 300)
    first = short_turns.submit([asked_of(numbered(0))])
    short_turns.step()
    second = short_turns.submit([asked_of(numbered(0))])
    shared.finish(short_turns, second)
    assert first.done and not long.done
    assert 1 <= sum(outcome is not None for outcome in long.outcomes) <= 290
    shared.finish(short_turns, long)
    assert len(long.results()) == 300


def test_a_long_call_is_answered_while_others_never_stop_asking(short_turns: GuardEngine) -> None:
    engine, asked, number = short_turns, list[Call](), 0
    long = engine.submit([asked_of(shared.long_conversation(60))] * 150)
    most = engine.backend._engine.vllm_config.scheduler_config.max_num_seqs
    while not long.done and number < 4000:
        asked = [call for call in asked if not call.done]
        while len(asked) < most:  # as many as a batch holds, each with a conversation of its own
            number += 1
            asked.append(engine.submit([asked_of(numbered(number))]))
        engine.step()
    for call in asked:
        engine.cancel(call)
    assert long.done and len(long.results()) == 150


@pytest.mark.parametrize(
    ("name", "is_shared"), [("pii_leak", True), ("plain", False), (None, True)]
)
def test_a_conversation_s_rules_come_in_its_own_turn_and_a_lora_is_a_conversation_each(
    short_turns: GuardEngine, name: str | None, is_shared: bool
) -> None:
    """What is parted may find its conversation gone. The base reads it as aLoRAs do."""
    conversation, text = shared.long_conversation(200), RULE_TEXTS[name or "plain"]
    prefix, suffix = len(prompts().prefix_ids(conversation)), len(prompts().suffix_ids(text))
    clock = short_turns._dispatcher.virtual_time = 100
    asked = short_turns.submit([ScoreRequest(conversation, text, name)] * 20)
    in_flight = short_turns._dispatcher.in_flight.values()
    starts = [prompt.request.virtual_start for prompt in in_flight]
    assert starts[0] == clock and starts == sorted(starts)
    own = suffix if is_shared else prefix + suffix
    assert len(set(starts)) == math.ceil(19 * own / 256)
    assert {start % 256 for start in starts} == {clock % 256}
    short_turns.cancel(asked)
    begun = starts.count(clock)  # what had not begun when it was cancelled counts for nothing
    assert short_turns._dispatcher.virtual_time == clock + prefix + suffix + (begun - 1) * own


def test_turns_are_always_bounded(short_turns: GuardEngine) -> None:
    """And what is not shared, of other salts say, is counted each time."""
    requests, tokens = [], Counter[int]()
    for number in [*range(20)] * 15:
        messages = numbered(number)
        requests += [asked_of(messages, "pii_leak", salt) for salt in ("one", "two")]
    asked = short_turns.submit(requests)
    for in_flight in short_turns._dispatcher.in_flight.values():
        tokens[in_flight.request.virtual_start] += in_flight.own_tokens
    short_turns.cancel(asked)
    suffix = len(prompts().suffix_ids(RULE_TEXTS["pii_leak"]))
    longest = len(prompts().prefix_ids(numbered(19)))
    assert tokens.total() > len(requests) * suffix
    assert max(tokens.values()) < 3 * 256 + longest + suffix


def test_what_is_not_cached_is_answered_while_cached_ones_keep_coming(engine: GuardEngine) -> None:
    resident, calls = numbered(1, words=375), list[Call]()
    with shared.steps_of(engine, 512):
        engine.score([asked_of(resident, "pii_leak")])
        for step in range(20):
            for number in range(8):  # more than a step's tokens
                longer = Message("assistant", f"{step} {number} " + "more " * 75)
                calls.append(engine.submit([asked_of((*resident, longer), "pii_leak")]))
            if step == 0:
                waiting = engine.submit([asked_of(numbered(2, words=375), "pii_leak")])
            engine.step()
            assert step != 1 or not waiting.done
        for call in calls:
            engine.cancel(call)
    assert waiting.done


def test_a_conversation_has_all_its_verdicts_before_the_next_one(short_turns: GuardEngine) -> None:
    """Else its keys and values would have to stay, and its verdicts wait, until all of them are."""
    engine = short_turns
    tokens = engine.backend._engine.vllm_config.scheduler_config.max_num_batched_tokens
    assert 1600 < tokens < 3000  # no two in one step
    asked: list[Call] = []
    for number in range(3):
        asked.append(engine.submit([asked_of(numbered(number, words=1500), "pii_leak")] * 5))
    done: list[list[bool]] = []
    while not all(each.done for each in asked):
        engine.step()
        done.append([each.done for each in asked])
    assert [True, False, False] in done and [True, True, False] in done
