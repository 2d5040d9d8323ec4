"""How large a request may be, and how many may come at once. Knows nothing of what they ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from serve.engine.thread import MAX_OPEN, MAX_QUEUED

MAX_MESSAGES = 10_000  # of a conversation; a message costs five tokens at least
MAX_RULES = 1_000  # of a check
# Of a conversation: several times as many as fit any context, and few enough to tokenise in a
# second.
MAX_CHARACTERS = 1_000_000
# Of a request: a conversation as long as may be, with every character escaped.
MAX_BYTES = 16 * 2**20
MAX_REQUESTS = MAX_OPEN + MAX_QUEUED + 32  # whose bodies are in memory at once
MAX_SALT = 200  # characters
MAX_TEXTS = 256  # of a request that has several, each checked by itself
MAX_METADATA = 32  # keys of a request
MAX_METADATA_KEY = 64  # characters
MAX_METADATA_VALUE = 200
TEXTS_AT_ONCE = 16  # of one request in the engine, so that others find room beside it

TOO_MANY = "too many checks are waiting. Try again later"

RETRY_AFTER = {"retry-after": "1"}  # seconds; what is refused for want of room is tried again

# What a request says of itself, for the conditions of rule sets.
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_METADATA_KEY)],
        Annotated[str, Field(max_length=MAX_METADATA_VALUE)],
    ],
    Field(max_length=MAX_METADATA),
]

# The response to a request that gets an HTTP status and a message instead of an answer.
Refuse = Callable[[Scope, int, str, Mapping[str, str] | None], Response]


class BoundedBodies:
    """ASGI middleware that refuses large bodies before they are read, or as soon as they are large.

    The limit is MAX_BYTES, or less if the caller's is. A request that comes while MAX_REQUESTS are
    under way is refused too.
    """

    def __init__(self, app: ASGIApp, refuse: Refuse) -> None:
        self._app = app
        self._refuse = refuse
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, if there is room for it."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif self._under_way >= MAX_REQUESTS:
            await self._refuse(scope, 503, TOO_MANY, RETRY_AFTER)(scope, receive, send)
        elif _content_length(scope) > _max_bytes(scope):
            message = _too_large(_max_bytes(scope))
            await self._refuse(scope, 413, message, None)(scope, receive, send)
        else:
            self._under_way += 1
            try:
                await self._app(scope, _bounded(receive, _max_bytes(scope)), send)
            finally:
                self._under_way -= 1


def _max_bytes(scope: Scope) -> int:
    """Of a body of this caller's."""
    caller_limit: int | None = scope["caller"].limits.body_bytes
    return min(MAX_BYTES, caller_limit or MAX_BYTES)


def _too_large(max_bytes: int) -> str:
    return f"the body is too large; the limit is {max_bytes:,} bytes"


def _content_length(scope: Scope) -> int:
    """The bytes that the request claims to have; 0 where it claims nothing."""
    value = dict(scope.get("headers", ())).get(b"content-length", b"")
    if not value.isdigit():
        return 0
    return int(value)


def _bounded(receive: Receive, max_bytes: int) -> Receive:
    """`receive`, which raises an HTTPException once more than `max_bytes` have come in."""
    received = 0

    async def counted() -> AsgiMessage:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > max_bytes:
            raise HTTPException(413, _too_large(max_bytes))
        return message

    return counted
