"""An engine that allows nothing, so that whatever reads as an allow is a fault. Tests only."""

from __future__ import annotations

from tests.serve.toy_engine import ToyEngine

RULES = ("always", "refused")


class NeverAllows(ToyEngine):
    """The rule "always" is violated by everything; "refused" cannot be judged."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(RULES, 5.0))
        del self.logits["refused"]
