"""What waits for the engine: a check, or a change of its rules, and where the answer goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.engine.refusals import CallerGone, engine_failure, too_late
from serve.engine.score import Check


@dataclass
class PendingCheck:
    """A check that was asked for, and where its answer goes."""

    messages: tuple[Message, ...]
    rules: tuple[str, ...] | None
    cache_salt: str | None
    deadline: float  # by time.monotonic
    future: Future[Check] = field(default_factory=Future)
    is_given_up: bool = False

    def failure(self) -> GuardError | None:
        """The reason why no more work should go into it; None if there is no such reason."""
        if self.is_given_up:
            return CallerGone("the caller is gone")
        if time.monotonic() > self.deadline:
            return too_late()
        return None

    def fail(self, error: BaseException) -> None:
        self.future.set_exception(engine_failure(error))


@dataclass
class PendingChange:
    """What is to be changed of the engine's rules, and who waits for it."""

    change: Callable[[], None]
    future: Future[None] = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        self.future.set_exception(engine_failure(error))
