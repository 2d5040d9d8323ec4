"""A reply that is being written: what of it is to be checked next, and what may be shown. Knows
nothing of connections.

Text is checked when a sentence ends, or once CHECK_CHARACTERS have come since the last check. Only
what a check has allowed is released, without its last `hold_back` characters: a violation often
shows a few words after it began. At its end the whole reply is checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SENTENCE_ENDS = (".", "!", "?", "\n", "\u3002", "\uff01", "\uff1f")  # the last three full-width
CHECK_CHARACTERS = 200
HOLD_BACK = 20


class Reply:
    """The reply to `messages`, so far."""

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        check_characters: int = CHECK_CHARACTERS,
        hold_back: int = HOLD_BACK,
    ) -> None:
        self._messages = list(messages)
        self._check_characters = check_characters
        self._hold_back = hold_back
        self._text = ""
        self._checked = self._released = 0  # characters

    @property
    def conversation(self) -> list[Mapping[str, Any]]:
        """The messages, and the reply so far."""
        return [*self._messages, {"role": "assistant", "content": self._text}]

    def add(self, piece: str) -> bool:
        """Append what was written; True when it is time for a check."""
        self._text += piece
        if len(self._text) - self._checked >= self._check_characters:
            return True
        return any(end in piece for end in SENTENCE_ENDS)

    def allowed(self) -> str:
        """Note that the check of `conversation` allowed it; the text that may be shown now."""
        self._checked = len(self._text)
        return self._release(self._checked - self._hold_back)

    def ended(self) -> str:
        """Note that the check of the whole reply allowed it; the rest of the text."""
        return self._release(len(self._text))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written."""
        return not self._text

    def _release(self, end: int) -> str:
        text = self._text[self._released : max(end, self._released)]
        self._released += len(text)
        return text
