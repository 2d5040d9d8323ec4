"""What is tokenised, how often, and what is refused before it is."""

from __future__ import annotations

import pytest
from pytest import MonkeyPatch

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.engine import GuardEngine
from serve.engine.prompts import Prompts
from tests.serve.cards import prompts, recipe
from tests.serve.engine.shared import long_conversation
from tests.serve.engine.toy import ToyBackend
from tests.serve.guarded import CONVERSATION, adapter_folders

CONTEXT = 2048
Tokenised = list[tuple[Message, int]]


@pytest.fixture
def seen(monkeypatch: MonkeyPatch) -> Tokenised:
    """The messages that are tokenised from now on, and how many tokens each has."""
    seen: Tokenised = []
    turn_ids = prompts().turn_ids

    def counted(message: Message) -> list[int]:
        ids = turn_ids(message)
        seen.append((message, len(ids)))
        return ids

    monkeypatch.setattr(prompts(), "turn_ids", counted)
    return seen


def test_the_conversation_is_tokenised_once_whatever_the_number_of_rules(
    seen: Tokenised, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.engine.adapter.prompt_builder", lambda _: prompts())
    engine = GuardEngine(recipe(), adapter_folders(), start_backend=lambda *_: ToyBackend())
    assert len(engine.check(CONVERSATION).verdicts) == 4
    assert [message for message, _ in seen] == list(CONVERSATION)


@pytest.mark.parametrize(
    ("messages", "got", "most_tokens", "most_messages"),
    [
        ([Message("user", "x" * 100_000)], "100,000 characters", 0, 0),  # no context holds it
        ([Message("user", "\u4f60" * 30_000)], r"more than [\d,]+ tokens", 4 * CONTEXT, 9),
        ([Message("user", "\u00e9 " * 20)] * 500, "more than 2,048 tokens", 1.05 * CONTEXT, 125),
    ],
)
def test_what_does_not_fit_is_refused_before_all_of_it_is_tokenised(
    seen: Tokenised, messages: list[Message], got: str, most_tokens: float, most_messages: int
) -> None:
    with pytest.raises(GuardError, match=f"does not fit the context.*{got}"):
        Prompts(prompts(), CONTEXT).prefix(messages)
    assert len(seen) <= most_messages and sum(tokens for _, tokens in seen) <= most_tokens


def test_the_longest_conversation_that_fits_is_judged() -> None:
    fitting = Prompts(prompts(), CONTEXT)
    fixed = len(prompts().build(long_conversation(1), "Be nice.").token_ids) - 1
    for more in (0, 1):
        messages = long_conversation(CONTEXT - 1 - fixed + more)
        assert fitting.prefix(messages) == prompts().prefix_ids(messages)
    fitting.check_length(CONTEXT - 1)  # and the verdict
    with pytest.raises(GuardError, match=r"does not fit the context.*2,049 tokens"):
        fitting.check_length(CONTEXT)
