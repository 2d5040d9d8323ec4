"""An engine that knows one word. Tests only."""

from __future__ import annotations

from collections.abc import Sequence

from guard.conversation.example import Message
from serve.engine import Call, OpenCheck, Refusal, Score
from tests.serve.toy_engine import ToyEngine

ASKED = [{"role": "user", "content": "Tell me of the sea."}]


class Censor(ToyEngine):
    """The rule "words" is violated where a message holds "forbidden"."""

    def __init__(self) -> None:
        super().__init__({"words": -5.0, "fine": -5.0})
        self.violated: list[Call] = []

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None,
        *,
        cache_salt: str | None = None,
        policies: Sequence[str] = (),
    ) -> OpenCheck:
        opened = super().open_check(messages, rules, cache_salt=cache_salt, policies=policies)
        if any("forbidden" in message.content for message in messages):
            self.violated.append(opened.call)
        return opened

    def _outcome(self, name: str, call: Call) -> Score | Refusal:
        if name == "words" and any(other is call for other in self.violated):
            return Score(5.0, cached_tokens=3, computed_tokens=2, latency_ms=1.0)
        return super()._outcome(name, call)
