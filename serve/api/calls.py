"""Conversations of calls under way, for gateways that send a reply without what it replies to.

Knows nothing of any format, and keeps nothing longer than CALL_S.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from guard.conversation.chat import unread_parts
from guard.conversation.example import Message
from serve.api.errors import Unjudged

CALL_S = 900.0  # how long a call's reply is waited for
OVERHEAD_CHARACTERS = 200  # of each call, and of each message
AMBIGUOUS = "two conversations were sent with the id of this call"
MAX_KEPT_CHARACTERS = 100_000_000  # of all kept conversations together


@dataclass(frozen=True)
class CallUnderWay:
    """What was sent to a model; `is_ambiguous` once its id was used for two conversations."""

    messages: tuple[Message, ...]
    cache_salt: str | None
    until: float  # by time.monotonic
    is_ambiguous: bool = False

    @property
    def characters(self) -> int:
        """The memory that it takes, in characters; a message without text takes some too."""
        texts = sum(len(message.content) for message in self.messages)
        unread = sum(len(part) for part in unread_parts(self.messages))
        return texts + unread + (len(self.messages) + 1) * OVERHEAD_CHARACTERS


class CallsUnderWay:
    """The conversations of one caller's calls whose replies are still to come, by the call's id.

    The oldest are dropped once all conversations together exceed `max_characters`.
    """

    def __init__(self, max_characters: int = MAX_KEPT_CHARACTERS) -> None:
        self._max_characters = max_characters
        self._calls: dict[str, CallUnderWay] = {}  # the oldest first
        self._characters = 0

    def keep(
        self, call_id: str, messages: tuple[Message, ...], cache_salt: str | None = None
    ) -> None:
        """Remember what a model is sent, if a reply may come: what is refused has none, and would
        push out what has one.
        """
        self._forget_old()
        previous = self._drop(call_id)
        is_ambiguous = False
        if previous is not None:
            is_ambiguous = previous.is_ambiguous or previous.messages != messages
        call = CallUnderWay(messages, cache_salt, time.monotonic() + CALL_S, is_ambiguous)
        self._calls[call_id] = call
        self._characters += call.characters
        while self._characters > self._max_characters:
            self._drop(next(iter(self._calls)))

    def find(self, call_id: str | None) -> CallUnderWay:
        """What the model was sent. Raises Unjudged unless that is known for certain."""
        self._forget_old()
        call = self._calls.get(call_id or "")
        if call is None:
            why = "the reply's conversation is not known here; have requests checked too, by the "
            why += f"same server, not longer than {CALL_S:.0f} s before, and send the call's id"
            raise Unjudged(why, "unknown_conversation")
        if call.is_ambiguous:
            raise Unjudged(AMBIGUOUS, "unknown_conversation")
        return call

    def _forget_old(self) -> None:
        while self._calls:
            oldest = next(iter(self._calls))
            if self._calls[oldest].until > time.monotonic():
                break
            self._drop(oldest)

    def _drop(self, call_id: str) -> CallUnderWay | None:
        call = self._calls.pop(call_id, None)
        if call is not None:
            self._characters -= call.characters
        return call
