"""An engine that knows one word. Tests only."""

from __future__ import annotations

from collections.abc import Sequence

from guard.example import Message
from serve.engine import Call, OpenCheck, Refusal, Score
from tests.serve.toy_engine import ToyEngine

ASKED = [{"role": "user", "content": "Tell me of the sea."}]


class Censor(ToyEngine):
    """The rule "words" is violated where a message holds "forbidden"."""

    def __init__(self) -> None:
        super().__init__({"words": -5.0, "fine": -5.0})
        self._violated: list[Call] = []

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None,
        *,
        cache_salt: str | None = None,
    ) -> OpenCheck:
        check = super().open_check(messages, rules, cache_salt=cache_salt)
        if any("forbidden" in message.content for message in messages):
            self._violated.append(check.call)
        return check

    def _outcome(self, name: str, call: Call) -> Score | Refusal:
        if name == "words" and any(call is violated for violated in self._violated):
            return Score(5.0, cached_tokens=3, computed_tokens=2, latency_ms=1.0)
        return super()._outcome(name, call)
