"""An engine whose rules know a word each. Tests only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from guard.conversation.example import Message
from serve.engine import OpenCheck
from tests.serve.toy_engine import ToyEngine

WORDS = {"medical_advice": "ibuprofen", "pii_leak": "Elm Street"}
CANNOT_BE_JUDGED = "cannot be judged"  # in a message: each rule refuses
BREAKS = "breaks the engine"  # in a message: the batch breaks, which is status 503


class WordEngine(ToyEngine):
    """A rule is violated where any message holds its word; a message may also ask for a fault."""

    def __init__(self, words: Mapping[str, str] = WORDS) -> None:
        super().__init__(dict.fromkeys(words, -5.0))
        self.words = dict(words)

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None,
        *,
        cache_salt: str | None = None,
        policies: Sequence[str] = (),
    ) -> OpenCheck:
        text = "\n".join(message.content for message in messages)
        if CANNOT_BE_JUDGED in text:
            # What the toy engine knows is a message of these words and no others.
            return super().open_check((Message("user", CANNOT_BE_JUDGED),), rules)
        check = super().open_check(messages, rules, cache_salt=cache_salt, policies=policies)
        names, call = self.open[-1]
        if BREAKS in text:
            names[:] = ["crash"]
            return check
        for index, name in enumerate(names):
            self.logits = self.logits | {name: 5.0 if self.words[name] in text else -5.0}
            call.outcomes[index] = self._outcome(name, call)
        call.waiting.clear()
        return check
