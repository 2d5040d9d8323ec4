"""Which conversation a request belongs to: all of a conversation go to the replica that has it.

A request's key is that of `serve.api.session`. Knows nothing of replicas.

LiteLLM sends a reply without its conversation, and joins it to the request by a call's id. The
replica that read the request has the conversation in memory, so the reply must come to the same
one. The id itself is no key: each call has another, and a conversation would be computed anew at
each turn. So the id is kept here with the request's key, for as long as the replica keeps the
conversation. A reply with an unknown id goes by the id, and is unjudged on any replica. A reply is
unjudged too if its id came with two keys: two replicas have a conversation of it, and neither knows
of the other's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from guard.conversation.chat import turns_of
from guard.errors import GuardError
from serve.api.calls import AMBIGUOUS, CALL_S
from serve.api.errors import Unjudged
from serve.api.formats.table import WIRE_FORMATS
from serve.api.input.strict_json import read_body
from serve.api.session import SESSION_HEADER, beginning_of, hashed
from serve.api.wire_format import WireFormat, format_of
from serve.cluster.messages import RelayedRequest

MAX_CALLS = 1_000_000  # ids that are kept; beyond, the oldest make room


class KeptKey(NamedTuple):
    """The key of a call's request; `is_ambiguous` once its id came with another one too."""

    key: str
    until: float  # by time.monotonic
    is_ambiguous: bool = False


class SessionKeys:
    """The key of every request. For one thread."""

    def __init__(self, max_calls: int = MAX_CALLS) -> None:
        self._max_calls = max_calls
        self._calls: dict[bytes, KeptKey] = {}  # the oldest first

    def key(self, relayed: RelayedRequest, tenant: str = "") -> str:
        """A text that is the same for all requests of a conversation.

        Raises Unjudged for a reply whose call's id stood for two conversations.
        """
        session = relayed.header(SESSION_HEADER)
        body = _json_object(relayed.body)
        wire_format = WIRE_FORMATS.get(format_of(WIRE_FORMATS, relayed.path) or "")
        call_id = _call_id(wire_format, body)
        if session:
            key = hashed(tenant, "session", session)
        elif head := _head(wire_format, body):
            key = hashed(tenant, "conversation", body.get("cache_salt"), *head)
        else:  # a reply alone, or what a replica will refuse
            return self._call_key(tenant, call_id) or hashed(tenant, call_id, relayed.body)
        if call_id:
            self._keep(tenant, call_id, key)
        return key

    def _call_key(self, tenant: str, call_id: str) -> str | None:
        if not call_id:
            return None
        kept = self._kept(_id(tenant, call_id))
        if kept is None:
            return hashed(tenant, "call", call_id)
        if kept.is_ambiguous:
            raise Unjudged(AMBIGUOUS, "unknown_conversation")
        return kept.key

    def _kept(self, name: bytes) -> KeptKey | None:
        kept = self._calls.get(name)
        if kept is None or time.monotonic() > kept.until:
            return None
        return kept

    def _keep(self, tenant: str, call_id: str, key: str) -> None:
        name = _id(tenant, call_id)
        previous = self._kept(name)
        is_ambiguous = False
        if previous is not None:
            is_ambiguous = previous.is_ambiguous or previous.key != key
        self._calls.pop(name, None)
        self._calls[name] = KeptKey(key, time.monotonic() + CALL_S, is_ambiguous)
        while len(self._calls) > self._max_calls or self._is_oldest_over():
            self._calls.pop(next(iter(self._calls)))

    def _is_oldest_over(self) -> bool:
        for oldest in self._calls.values():
            return time.monotonic() > oldest.until
        return False


def _json_object(body: bytes) -> dict[str, Any]:
    """The body; empty if it is no such object, which a replica will refuse."""
    try:
        content = read_body(body)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _call_id(wire_format: WireFormat | None, body: dict[str, Any]) -> str:
    """What joins a reply to its request, in a format that sends them one by one."""
    if wire_format is None or not wire_format.call_id:
        return ""
    call_id = body.get(wire_format.call_id)
    return call_id if isinstance(call_id, str) else ""


def _head(wire_format: WireFormat | None, body: dict[str, Any]) -> list[Any]:
    """What the conversation begins with; empty if the body has none."""
    beginning = wire_format.beginning(body) if wire_format else None
    if beginning is None:
        return []
    if beginning.messages:
        return _rendered(_until_first_user(beginning.messages), beginning.tools)
    return [beginning.text]


def _rendered(messages: Sequence[Any], tools: Any) -> list[Any]:
    """The messages as a stream's key has them; as they are where a replica will refuse them."""
    try:
        return beginning_of(turns_of(messages, tools or (), where="messages"))
    except (GuardError, TypeError, AttributeError):
        return list(messages)


def _until_first_user(messages: Sequence[Any]) -> Sequence[Any]:
    for number, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            return messages[: number + 1]
    return messages


def _id(tenant: str, call_id: str) -> bytes:
    return bytes.fromhex(hashed(tenant, "call", call_id))
