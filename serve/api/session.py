"""The key of a conversation, by which its requests come to one replica, and a canary decides for
all of them or for none. It never changes while a conversation grows: it is the caller's header
`x-session-id`, or a hash of the tenant and of the turns up to the first user's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from guard.conversation.example import Message

SESSION_HEADER = "x-session-id"


def conversation_key(
    messages: Sequence[Message], cache_salt: str | None, session: str, tenant: str = ""
) -> str:
    """A text that is the same for all requests of a conversation."""
    if session:
        return hashed(tenant, "session", session)
    return hashed(tenant, "conversation", cache_salt, *beginning_of(messages))


def beginning_of(conversation: Sequence[Message]) -> list[Any]:
    """Role and content of each turn, up to and with the user's first."""
    head: list[Any] = []
    for turn in conversation:
        head.append([turn.role, turn.content])
        if turn.role == "user":
            break
    return head


def hashed(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in parts:
        text = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        digest.update(len(text).to_bytes(8, "big") + text)
    return digest.hexdigest()
