"""Prompts as token ids that fit the context. Knows nothing of which rules are served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from serve.engine.codes import Code

# Hardly any text has more. One that is longer than this times the context is refused before it is
# tokenised.
CHARACTERS_PER_TOKEN = 16
# Tokens by which a text that was cut may have more than the whole: what was one word is another.
PROBE_SLACK = 128
POLICIES_KEPT = 1_024


class Unanswerable(GuardError):
    """No rule can answer this prompt; `code` says why."""

    def __init__(self, problem: str, code: Code, *, got: str | None = None, remedy: str) -> None:
        super().__init__(problem, got=got, remedy=remedy)
        self.code = code


class Prompts:
    """Tokenises conversations and rules, and refuses what does not fit `context_tokens`."""

    def __init__(self, builder: PromptBuilder, context_tokens: int) -> None:
        self.builder = builder
        self.context_tokens = context_tokens
        self._suffixes: dict[str, list[int]] = {}  # rule text -> token ids: few, and used again
        # Those of policies, kept by their salts: no time tells what another tenant states.
        self.policy_suffix = lru_cache(POLICIES_KEPT)(lambda text, salt: builder.suffix_ids(text))

    def suffix(self, rule_text: str) -> list[int]:
        """The token ids of a rule's turn and the answer's header; made once."""
        if rule_text not in self._suffixes:
            self._suffixes[rule_text] = self.builder.suffix_ids(rule_text)
        return self._suffixes[rule_text]

    def prefix(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation. Raises GuardError if there is none, or too much."""
        if not messages:
            problem = "there is no conversation to judge"
            raise Unanswerable(problem, "nothing_said", remedy="Give at least one message")
        characters = sum(len(message.content) for message in messages)
        if characters > CHARACTERS_PER_TOKEN * self.context_tokens:
            raise self._too_long(f"{characters:,} characters")
        ids: list[int] = []
        for piece in self.builder.prefix_pieces(map(self._probed, messages)):
            ids += piece
            if len(ids) > self.context_tokens:  # and the rest is not tokenised
                raise self._too_long(f"more than {self.context_tokens:,} tokens")
        return ids

    def text_tokens(self, text: str) -> int:
        """How many tokens a text has by itself, without a turn around it; from any thread."""
        turn = len(self.builder.turn_ids(Message("assistant", text)))
        return turn - len(self.builder.turn_ids(Message("assistant", "")))

    def check_length(self, tokens: int) -> None:
        """Raise GuardError for a prompt that does not fit the context with its verdict."""
        needed = tokens + self.builder.verdict_tokens
        if needed > self.context_tokens:
            raise self._too_long(f"{needed:,} tokens")

    def _too_long(self, got: str) -> GuardError:
        problem = "the prompt does not fit the context and is never cut"
        remedy = f"Shorten it to fit {self.context_tokens:,} tokens"
        return Unanswerable(problem, "too_long", got=got, remedy=remedy)

    def _probed(self, message: Message) -> Message:
        """The message; a text that is too long is refused before all of it is tokenised."""
        length = self.context_tokens
        while length < len(message.content):
            start = replace(message, content=message.content[:length])
            tokens = len(self.builder.turn_ids(start))
            if tokens > self.context_tokens + PROBE_SLACK:
                raise self._too_long(f"more than {tokens:,} tokens")
            length *= 2
        return message
