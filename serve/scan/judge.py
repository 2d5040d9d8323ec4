"""Puts many stored conversations to rules. Knows nothing of where they come from or where verdicts
go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from guard.conversation.example import Message
from serve.engine.mixed import CheckEngine, OpenedCheck
from serve.engine.score import Check

OPEN = 32  # checks in the engine at once: enough to fill its batches


class ScanEngine(CheckEngine, Protocol):
    """What a scan needs of an engine."""

    def forget(self) -> None:
        """Empty the prefix cache."""
        ...


def judge(
    engine: ScanEngine, conversations: Sequence[tuple[Message, ...]], rules: Sequence[str]
) -> list[Check]:
    """A check of each conversation, in their order.

    They are asked sorted by what they begin with, so that those that share it meet in the cache.
    That is empty at first: what else the engine was asked changes no batch, and so no digit, of
    these, where every adapter has a slot. Raises what the engine raises; nothing is left in it
    then.
    """
    engine.forget()
    checks: dict[int, Check] = {}
    under_way: dict[int, OpenedCheck] = {}
    waiting = sorted(range(len(conversations)), key=lambda row: _key(conversations[row]))
    waiting.reverse()  # the last is the next
    try:
        while waiting or under_way:
            while waiting and len(under_way) < OPEN:
                row = waiting.pop()
                under_way[row] = engine.open_check(conversations[row], rules)
            engine.step()
            for row in [row for row, check in under_way.items() if check.call.done]:
                checks[row] = under_way.pop(row).result()
    finally:
        for check in under_way.values():
            engine.cancel(check.call)
    return [checks[row] for row in range(len(conversations))]


def _key(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]
