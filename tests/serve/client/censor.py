"""An engine that knows one word. Tests only."""

from __future__ import annotations

from collections.abc import Sequence

from guard.example import Message
from serve.engine import OpenCheck
from tests.serve.toy_engine import ToyEngine

ASKED = [{"role": "user", "content": "Tell me of the sea."}]


class Censor(ToyEngine):
    """The rule "words" is violated where a message holds "forbidden"."""

    def __init__(self) -> None:
        super().__init__({"words": -5.0, "fine": -5.0})

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None,
        *,
        cache_salt: str | None = None,
    ) -> OpenCheck:
        is_violated = any("forbidden" in message.content for message in messages)
        self.logits = {"words": 5.0 if is_violated else -5.0, "fine": -5.0}
        return super().open_check(messages, rules, cache_salt=cache_salt)
