"""What is tokenised, how often, and what is refused before it is."""

from __future__ import annotations

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.engine import GuardEngine, Refusal, Score, ScoreRequest
from serve.engine.prompts import Prompts
from tests.serve.cards import RULE_TEXTS, prompts
from tests.serve.engine.shared import long_conversation
from tests.serve.guarded import CONVERSATION, ENGINE

pytestmark = pytest.mark.slow


def test_the_conversation_is_tokenised_once_whatever_the_number_of_rules(
    engine: GuardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenised: list[Message] = []
    turn_ids = engine._prompts.builder.turn_ids
    monkeypatch.setattr(
        engine._prompts.builder,
        "turn_ids",
        lambda message: tokenised.append(message) or turn_ids(message),
    )
    engine.check(CONVERSATION)
    assert tokenised == list(CONVERSATION)


def test_a_text_that_no_context_can_hold_is_refused_before_it_is_tokenised(
    engine: GuardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engine._prompts.builder, "prefix_pieces", lambda _: pytest.fail("it was tokenised")
    )
    check = engine.check((Message("user", "x" * 100_000),))
    assert set(check.refused) == set(RULE_TEXTS)
    assert "100,000 characters" in check.refused["plain"].why


def test_of_a_text_that_is_too_long_only_so_much_is_tokenised(
    engine: GuardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what just fits is judged (above)."""
    turn_ids, seen = engine._prompts.builder.turn_ids, list[int]()

    def counted(message: Message) -> list[int]:
        seen.append(len(message.content))
        return turn_ids(message)

    monkeypatch.setattr(engine._prompts.builder, "turn_ids", counted)
    check = engine.check((Message("user", "\u4f60" * 30_000),))  # a token each
    assert (
        "more than" in check.refused["plain"].why and "does not fit" in check.refused["plain"].why
    )
    assert sum(seen) <= 4 * ENGINE["max_model_len"]


def test_of_many_short_messages_only_so_many_are_tokenised_as_are_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builder, seen = prompts(), list[int]()
    turn_ids = builder.turn_ids

    def counted(message: Message) -> list[int]:
        ids = turn_ids(message)
        seen.append(len(ids))
        return ids

    monkeypatch.setattr(builder, "turn_ids", counted)
    messages = [Message("user", "\u00e9 " * 20)] * 500
    with pytest.raises(GuardError, match="does not fit the context") as error:
        Prompts(builder, 2048).prefix(messages)
    assert error.value.got == "more than 2,048 tokens"
    assert 1900 < sum(seen) < 2100 and len(seen) < len(messages) / 4
    assert Prompts(builder, 2048).prefix(messages[:9]) == builder.prefix_ids(messages[:9])


def test_the_longest_conversation_that_fits_is_judged(engine: GuardEngine) -> None:
    fixed = len(prompts().build(long_conversation(1), "Be nice.").token_ids) - 1
    longest, longer = (
        ScoreRequest(long_conversation(2048 - 1 - fixed + more), "Be nice.", None)
        for more in (0, 1)
    )
    assert [type(outcome) for outcome in engine.score([longest, longer])] == [Score, Refusal]
