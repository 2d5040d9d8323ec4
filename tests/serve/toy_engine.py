"""An engine without a model, whose steps a test holds and breaks. Tests only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from guard.example import Message
from serve.engine import Call, OpenCheck, Refusal


class ToyEngine:
    """Answers a check of n rules after n steps, with refusals.

    A rule called "crash" breaks the batch it is in.
    """

    def __init__(self) -> None:
        card = SimpleNamespace(rule_text="Be nice.", threshold=0.5, weights_sha256="0")
        self.rules = {"crash": card, "fine": card}
        self.is_usable = True
        self.open: list[tuple[list[str], Call]] = []
        self.salts: list[str | None] = []
        self.on_step: Callable[[], object] = lambda: None
        self.may_step = threading.Event()
        self.may_step.set()

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None,
        *,
        cache_salt: str | None = None,
    ) -> OpenCheck:
        self.salts.append(cache_salt)
        names = list(rules or ())
        waiting: dict[str, Any] = dict.fromkeys(names)
        call = Call([None] * len(names), waiting)
        self.open.append((names[:], call))
        return OpenCheck(tuple(names), {}, call)

    def step(self) -> None:
        assert self.may_step.wait(10)
        self.on_step()
        for names, call in self.open:
            if "crash" in names:
                raise RuntimeError("the batch broke")
            if names:
                name = names.pop(0)
                call.waiting.pop(name)
                call.outcomes[-1 - len(names)] = Refusal(name, f"toy answer for {name}")

    def cancel(self, call: Call) -> None:
        call.waiting.clear()
        self.open = [(names, other) for names, other in self.open if other is not call]
