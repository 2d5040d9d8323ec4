"""The texts of a few conversations, read again from where they are stored.

Knows nothing of verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from guard.conversation.example import Message
from serve.scan.sources import read_source

MAX_CHARACTERS = 1200  # from the end of a conversation, where the judged text mostly is
ELLIPSIS = "…"

Origin = tuple[str, int]  # a conversation's source, and its row there


def excerpts(origins: Iterable[Origin]) -> dict[Origin, tuple[Message, ...]]:
    """The last MAX_CHARACTERS of each, by its origin. Raises GuardError for a source that cannot be
    read any more.
    """
    by_source: dict[str, set[int]] = {}
    for source, row in origins:
        by_source.setdefault(source, set()).add(row)
    texts: dict[Origin, tuple[Message, ...]] = {}
    for source, rows in by_source.items():
        last = max(rows)
        for stored in read_source(source):
            if stored.number in rows:
                texts[source, stored.number] = shortened(stored.messages)
            if stored.number >= last:
                break
    return texts


def shortened(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The end of a conversation: whole turns, and before them the end of one."""
    characters_left = MAX_CHARACTERS
    turns: list[Message] = []
    for message in reversed(messages):
        if characters_left <= 0:
            break
        content = message.content
        if len(content) > characters_left:
            content = ELLIPSIS + content[-characters_left:]
        turns.append(Message(message.role, content))
        characters_left -= len(content)
    if len(turns) < len(messages):
        turns.append(Message(messages[0].role, ELLIPSIS))
    turns.reverse()
    return tuple(turns)
