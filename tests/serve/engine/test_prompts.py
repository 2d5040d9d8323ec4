"""What is tokenised, how often, and what is refused before it is."""

from __future__ import annotations

import pytest
from pytest import MonkeyPatch

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from serve.engine import GuardEngine, Refusal, Score, ScoreRequest
from serve.engine.prompts import Prompts
from tests.serve.cards import RULE_TEXTS, prompts
from tests.serve.engine.shared import long_conversation
from tests.serve.guarded import CONVERSATION, ENGINE

pytestmark = pytest.mark.slow


Tokenised = list[tuple[Message, int]]


def tokenised_by(builder: PromptBuilder, monkeypatch: MonkeyPatch) -> Tokenised:
    """The messages that are tokenised from now on, and how many tokens each has."""
    seen: Tokenised = []
    turn_ids = builder.turn_ids

    def counted(message: Message) -> list[int]:
        ids = turn_ids(message)
        seen.append((message, len(ids)))
        return ids

    monkeypatch.setattr(builder, "turn_ids", counted)
    return seen


def test_the_conversation_is_tokenised_once_whatever_the_number_of_rules(
    engine: GuardEngine, monkeypatch: MonkeyPatch
) -> None:
    seen = tokenised_by(engine._prompts.builder, monkeypatch)
    engine.check(CONVERSATION)
    assert [message for message, _ in seen] == list(CONVERSATION)


def test_a_text_that_no_context_can_hold_is_refused_before_it_is_tokenised(
    engine: GuardEngine, monkeypatch: MonkeyPatch
) -> None:
    seen = tokenised_by(engine._prompts.builder, monkeypatch)
    check = engine.check((Message("user", "x" * 100_000),))
    assert set(check.refused) == set(RULE_TEXTS)
    assert "100,000 characters" in check.refused["plain"].why and not seen


def test_too_long_a_text_is_tokenised_in_part(
    engine: GuardEngine, monkeypatch: MonkeyPatch
) -> None:
    seen = tokenised_by(engine._prompts.builder, monkeypatch)
    why = engine.check((Message("user", "\u4f60" * 30_000),)).refused["plain"].why  # a token each
    assert "more than" in why and "does not fit" in why
    assert sum(len(message.content) for message, _ in seen) <= 4 * ENGINE["max_model_len"]


def test_of_too_many_messages_only_as_many_as_fit_are_tokenised(monkeypatch: MonkeyPatch) -> None:
    builder = prompts()
    seen = tokenised_by(builder, monkeypatch)
    messages = [Message("user", "\u00e9 " * 20)] * 500
    with pytest.raises(GuardError, match="does not fit the context") as error:
        Prompts(builder, 2048).prefix(messages)
    assert error.value.got == "more than 2,048 tokens"
    assert 1900 < sum(tokens for _, tokens in seen) < 2100 and len(seen) < len(messages) / 4
    assert Prompts(builder, 2048).prefix(messages[:9]) == builder.prefix_ids(messages[:9])


def test_the_longest_conversation_that_fits_is_judged(engine: GuardEngine) -> None:
    fixed = len(prompts().build(long_conversation(1), "Be nice.").token_ids) - 1
    longest, longer = (
        ScoreRequest(long_conversation(2048 - 1 - fixed + more), "Be nice.", None)
        for more in (0, 1)
    )
    assert [type(outcome) for outcome in engine.score([longest, longer])] == [Score, Refusal]
