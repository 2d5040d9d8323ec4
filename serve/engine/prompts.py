"""Prompts as token ids that fit the context: conversations once a call, rules' suffixes once an
engine.

Knows nothing of engines or of which rules are served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from serve.engine.codes import Code
from serve.engine.score import ScoreRequest

# Hardly any text has more. One that is longer than this times the context is refused before it is
# tokenised.
CHARACTERS_PER_TOKEN = 16
# Tokens by which a text that was cut may have more than the whole: what was one word is another.
PROBE_SLACK = 128


class EnginePrompt(NamedTuple):
    """Token ids up to where the verdict is predicted: the conversation's, then the rule's.

    `prefix` is one object for all of a call's prompts on one conversation.
    """

    prefix: list[int]
    suffix: list[int]

    @property
    def tokens(self) -> int:
        """The length of the prompt in tokens."""
        return len(self.prefix) + len(self.suffix)


class Unanswerable(GuardError):
    """No rule can answer this prompt; `code` says why."""

    def __init__(self, problem: str, code: Code, *, got: str | None = None, remedy: str) -> None:
        super().__init__(problem, got=got, remedy=remedy)
        self.code = code


class Prompts:
    """Tokenises conversations and rules for one engine, and refuses what does not fit
    `context_tokens`.
    """

    def __init__(self, builder: PromptBuilder, context_tokens: int) -> None:
        self.builder = builder
        self.context_tokens = context_tokens
        self._suffixes: dict[str, list[int]] = {}  # rule text -> token ids: few, and used again

    def of_call(self) -> CallPrompts:
        """The prompts of one call's requests."""
        return CallPrompts(self)

    def suffix(self, rule_text: str) -> list[int]:
        """The token ids of a rule's turn and the answer's header; made once."""
        if rule_text not in self._suffixes:
            self._suffixes[rule_text] = self.builder.suffix_ids(rule_text)
        return self._suffixes[rule_text]

    def prefix(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation. Raises GuardError if there is none or no context could
        hold it.
        """
        if not messages:
            problem = "there is no conversation to judge"
            raise Unanswerable(problem, "nothing_said", remedy="Give at least one message")
        characters = sum(len(message.content) for message in messages)
        if characters > CHARACTERS_PER_TOKEN * self.context_tokens:
            raise self.too_long(f"{characters:,} characters")
        ids: list[int] = []
        for piece in self.builder.prefix_pieces(map(self._probed, messages)):
            ids += piece
            if len(ids) > self.context_tokens:  # and the rest is not tokenised
                raise self.too_long(f"more than {self.context_tokens:,} tokens")
        return ids

    def text_tokens(self, text: str) -> int:
        """How many tokens a text has by itself, without a turn around it; from any thread."""
        turn = len(self.builder.turn_ids(Message("assistant", text)))
        return turn - len(self.builder.turn_ids(Message("assistant", "")))

    def too_long(self, got: str) -> GuardError:
        """The refusal of a prompt of this length."""
        problem = "the prompt does not fit the context and is never cut"
        remedy = f"Shorten it to fit {self.context_tokens:,} tokens"
        return Unanswerable(problem, "too_long", got=got, remedy=remedy)

    def _probed(self, message: Message) -> Message:
        """The message. A long text is refused after tokenising as much of it as is too long, not
        all of it.
        """
        length = self.context_tokens
        while length < len(message.content):
            start = replace(message, content=message.content[:length])
            tokens = len(self.builder.turn_ids(start))
            if tokens > self.context_tokens + PROBE_SLACK:
                raise self.too_long(f"more than {tokens:,} tokens")
            length *= 2
        return message


class CallPrompts:
    """The prompts of one call: each of its conversations is tokenised once, and its refusal kept
    too.
    """

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        # By identity, which is cheap: the requests keep their messages alive.
        self._prefixes: dict[int, list[int] | GuardError] = {}

    def prompt(self, request: ScoreRequest) -> EnginePrompt:
        """The request's prompt. Raises GuardError if it cannot be judged or does not fit the
        context.
        """
        prefix = self._prefix(request.messages)
        prompt = EnginePrompt(prefix, self._prompts.suffix(request.rule_text))
        needed = prompt.tokens + self._prompts.builder.verdict_tokens
        if needed > self._prompts.context_tokens:
            raise self._prompts.too_long(f"{needed:,} tokens")
        return prompt

    def _prefix(self, messages: Sequence[Message]) -> list[int]:
        key = id(messages)
        if key not in self._prefixes:
            try:
                self._prefixes[key] = self._prompts.prefix(messages)
            except GuardError as error:
                self._prefixes[key] = error
        prefix = self._prefixes[key]
        if isinstance(prefix, GuardError):
            raise prefix
        return prefix
