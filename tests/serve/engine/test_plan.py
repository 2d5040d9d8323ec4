"""Virtual-time fair queueing on the real vLLM: who is answered when, and that nobody waits for
ever.
"""

from __future__ import annotations

import math

import pytest

from guard.conversation.example import Message
from serve.engine import Call, GuardEngine, ScoreRequest
from tests.serve.cards import RULE_TEXTS, prompts
from tests.serve.engine.shared import long_conversation, steps_of
from tests.serve.guarded import CONVERSATION

pytestmark = pytest.mark.slow

STEP_TOKENS = 512


@pytest.fixture
def short_turns(engine: GuardEngine, monkeypatch: pytest.MonkeyPatch) -> GuardEngine:
    """The shared engine, taking turns after every few requests."""
    monkeypatch.setattr(engine.backend, "step_tokens", 64)
    return engine


def test_a_rule_behind_a_long_call_is_answered_before_its_end(short_turns: GuardEngine) -> None:
    """Whether it comes before the first batch or between batches; and the long call goes on in its
    turn.
    """
    engine = short_turns
    many = [ScoreRequest(CONVERSATION, RULE_TEXTS["plain"], "plain")] * 300
    one = [ScoreRequest((Message("user", "Short."),), RULE_TEXTS["plain"], "plain")]
    long, first = engine.submit(many), engine.submit(one)
    engine.step()
    second = engine.submit(one)
    while not second.done:
        engine.step()
    assert first.done and not long.done
    answered = sum(outcome is not None for outcome in long.outcomes)
    assert 1 <= answered <= 290
    while not long.done:
        engine.step()
    assert len(long.results()) == 300


def test_a_long_call_is_answered_although_others_never_stop_asking(
    short_turns: GuardEngine,
) -> None:
    engine, asked, number = short_turns, list[Call](), 0
    long = engine.submit([ScoreRequest(long_conversation(60), RULE_TEXTS["plain"], "plain")] * 300)
    most = engine.backend._engine.vllm_config.scheduler_config.max_num_seqs
    while not long.done and number < 4000:
        asked = [each for each in asked if not each.done]
        while len(asked) < most:  # as many as a batch holds, each with a conversation of its own
            number += 1
            messages = (Message("user", f"Number {number}."),)
            asked.append(engine.submit([ScoreRequest(messages, RULE_TEXTS["plain"], "plain")]))
        engine.step()
    for each in asked:
        engine.cancel(each)
    assert long.done
    assert len(long.results()) == 300


@pytest.mark.parametrize("clock", [0, 100, 250])
@pytest.mark.parametrize(
    ("name", "is_shared"), [("pii_leak", True), ("plain", False), (None, True)]
)
def test_a_conversation_s_rules_come_in_its_own_turn_and_a_lora_is_a_conversation_each(
    short_turns: GuardEngine, name: str | None, is_shared: bool, clock: int
) -> None:
    """What is parted may find its conversation gone from the cache, wherever the clock stands. The
    base reads it as aLoRAs do.
    """
    conversation, text = long_conversation(200), RULE_TEXTS[name or "plain"]
    prefix, suffix = len(prompts().prefix_ids(conversation)), len(prompts().suffix_ids(text))
    short_turns._dispatcher.virtual_time = clock
    asked = short_turns.submit([ScoreRequest(conversation, text, name)] * 20)
    in_flight = short_turns._dispatcher.in_flight.values()
    starts = [each.request.virtual_start for each in in_flight]
    assert starts[0] == clock and starts == sorted(starts)
    own = suffix if is_shared else prefix + suffix
    assert len(set(starts)) == math.ceil(19 * own / 256)
    assert {start % 256 for start in starts} == {clock % 256}
    short_turns.cancel(asked)
    begun = starts.count(clock)  # what had not begun when it was cancelled counts for nothing
    assert short_turns._dispatcher.virtual_time == clock + prefix + suffix + (begun - 1) * own


def test_what_is_not_in_the_cache_is_answered_although_what_is_never_stops_coming(
    engine: GuardEngine,
) -> None:
    resident = (Message("user", "word " * 375),)
    new = (Message("user", f"Another one. {'word ' * 375}"),)

    def submit(messages: tuple[Message, ...]) -> Call:
        return engine.submit([ScoreRequest(messages, RULE_TEXTS["pii_leak"], "pii_leak")])

    with steps_of(engine, STEP_TOKENS):
        engine.score([ScoreRequest(resident, RULE_TEXTS["pii_leak"], "pii_leak")])
        calls: list[Call] = []
        for step in range(20):
            for number in range(8):  # more than a step's tokens
                longer = Message("assistant", f"{step} {number} " + "more " * 75)
                calls.append(submit((*resident, longer)))
            if step == 0:
                waiting = submit(new)
            engine.step()
            if step == 1:
                assert not waiting.done
        for call in calls:
            engine.cancel(call)
    assert waiting.done


def test_a_conversation_has_all_its_verdicts_before_the_next_is_computed(
    short_turns: GuardEngine,
) -> None:
    """Else its keys and values would have to stay, and its verdicts wait, until all of them are."""
    engine = short_turns
    tokens = engine.backend._engine.vllm_config.scheduler_config.max_num_batched_tokens
    assert 1600 < tokens < 3000  # no two in one step
    asked: list[Call] = []
    for number in range(3):
        conversation = (Message("user", f"Number {number}. {'word ' * 1500}"),)
        requests = [ScoreRequest(conversation, RULE_TEXTS["pii_leak"], "pii_leak")] * 5
        asked.append(engine.submit(requests))
    done: list[list[bool]] = []
    while not all(each.done for each in asked):
        engine.step()
        done.append([each.done for each in asked])
    assert [True, False, False] in done and [True, True, False] in done


def test_the_clock_goes_on_by_what_a_call_was_counted_for_whatever_the_cache_held(
    short_turns: GuardEngine,
) -> None:
    """Else a LoRA's second check of a conversation, which computes little, would wait behind all
    who come later.
    """
    requests = [ScoreRequest(long_conversation(200), RULE_TEXTS["plain"], "plain")] * 20
    for _ in range(2):
        before = short_turns._dispatcher.virtual_time
        asked = short_turns.submit(requests)
        counted = sum(request.own_tokens for request in short_turns._dispatcher.in_flight.values())
        while not asked.done:
            short_turns.step()
        assert short_turns._dispatcher.virtual_time - before == counted > 20 * 200
