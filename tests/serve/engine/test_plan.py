"""Virtual-time fair queueing: on the real vLLM, who is answered when; nobody waits for ever."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from pytest import MonkeyPatch

from guard.conversation.example import Message
from serve.engine import Call, GuardEngine, ScoreRequest
from serve.engine.plan import FairQueue
from tests.serve.cards import RULE_TEXTS, prompts
from tests.serve.engine.shared import finish, long_conversation, steps_of
from tests.serve.guarded import CONVERSATION

pytestmark = pytest.mark.slow

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
    finish(short_turns, second)
    assert first.done and not long.done
    assert 1 <= sum(outcome is not None for outcome in long.outcomes) <= 290
    finish(short_turns, long)
    assert len(long.results()) == 300


def test_a_long_call_is_answered_while_others_never_stop_asking(short_turns: GuardEngine) -> None:
    engine, asked, number = short_turns, list[Call](), 0
    long = engine.submit([asked_of(long_conversation(60))] * 150)
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
    conversation, text = long_conversation(200), RULE_TEXTS[name or "plain"]
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
    with steps_of(engine, 512):
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
