"""How large a request may be, and how many may come at once. Knows nothing of what they ask."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from serve.api.input.encodings import unpacked
from serve.engine.thread.engine_thread import MAX_OPEN, MAX_QUEUED
from serve.policy.logic import MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE

log = logging.getLogger(__name__)

MAX_MESSAGES = 10_000  # of a conversation; a message costs five tokens at least
MAX_RULES = 1_000  # of a check
MAX_TOOLS = 1_000  # that a request describes
# Of a conversation: several times as many as fit any context, and few enough to tokenise in a
# second.
MAX_CHARACTERS = 1_000_000
# Of a request: a conversation as long as may be, with every character escaped.
MAX_BYTES = 16 * 2**20
MAX_REQUESTS = MAX_OPEN + MAX_QUEUED + 32  # requests whose bodies are in memory at once
MAX_STREAMS = 256  # streams beside them, open as long as a reply is being written
MILLISECONDS = re.compile(r"0{0,9}[1-9][0-9]{0,8}")
MAX_SALT = 200  # characters
MAX_CALL_ID = 200  # characters by which a reply's conversation is found
MAX_TEXTS = 256  # of a request that has several, each checked by itself
MAX_TURNS = 500  # of a conversation that is checked at the end of each
STREAM_S = 1800.0  # that a reply may be written for
TEXTS_AT_ONCE = 16  # of one request in the engine, so that others find room beside it

TIMEOUT_HEADER = "guard-timeout-ms"  # how long the caller waits, where that is less
TOO_MANY = "too many checks are waiting. Try again later"

RETRY_AFTER = {"retry-after": "1"}  # seconds; a check refused for lack of room is tried again


def _has_few_keys(metadata: Any) -> Any:
    """Before its items are looked at: pydantic makes an error of each, for seconds."""
    if isinstance(metadata, dict) and len(metadata) > MAX_METADATA:
        raise ValueError(f"at most {MAX_METADATA} keys, got {len(metadata)}")
    return metadata


# What a request says of itself, for the conditions of rule sets.
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_METADATA_KEY)],
        Annotated[str, Field(max_length=MAX_METADATA_VALUE)],
    ],
    Field(max_length=MAX_METADATA),  # for the schema
    BeforeValidator(_has_few_keys),
]

RequestKind = Literal["request", "stream"]

# The response to a request that gets an HTTP status and a message instead of an answer.
Refuse = Callable[[Scope, int, str, Mapping[str, str] | None], Response]


def route_path(scope: Scope) -> str:
    """The path that routes are found by: without what a proxy in front has before it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(f"{root}/"):
        return path[len(root) :]
    return path


def kind_of(scope: Scope, stream_paths: Collection[str]) -> RequestKind:
    """The kind that a request is counted as."""
    return "stream" if route_path(scope) in stream_paths else "request"


class NotRead(Exception):
    """The client does not read its answer."""


class BoundedBodies:
    """ASGI middleware that refuses large bodies before they are read, or as soon as they are large.

    The limit is MAX_BYTES, or less if the caller's is, for what is sent and for what it is once
    unpacked. A request that comes while `max_requests`,
    by default MAX_REQUESTS, are under way is refused too; those of `stream_paths` are counted by
    themselves, up to MAX_STREAMS, so that replies that are written slowly keep no other out. Each
    has `timeout_s` seconds from its head on, for its body and its checks together, or what
    TIMEOUT_HEADER says: its `scope["deadline"]`, by time.monotonic. A format whose bodies are
    written slowly moves that, by `scope["seconds"]` each time.

    A piece of the answer that the client does not read within `timeout_s` is the last: it ends the
    request, and leaves its place to others.
    """

    def __init__(
        self,
        app: ASGIApp,
        refuse: Refuse,
        timeout_s: float,
        *,
        max_requests: int | None = None,
        stream_paths: Collection[str] = (),
    ) -> None:
        self._app = app
        self._refuse = refuse
        self._timeout_s = timeout_s
        self._max_requests = max_requests
        self._stream_paths = stream_paths
        self._under_way: dict[RequestKind, int] = {"request": 0, "stream": 0}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, if there is room for it."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        kind = kind_of(scope, self._stream_paths)
        limit = MAX_STREAMS if kind == "stream" else self._max_requests or MAX_REQUESTS
        if self._under_way[kind] >= limit:
            await self._refuse(scope, 503, TOO_MANY, RETRY_AFTER)(scope, receive, send)
        elif _content_length(scope) > _max_bytes(scope):
            message = _too_large(_max_bytes(scope))
            await self._refuse(scope, 413, message, None)(scope, receive, send)
        else:
            await self._pass_on(kind, scope, receive, send)

    async def _pass_on(self, kind: RequestKind, scope: Scope, receive: Receive, send: Send) -> None:
        seconds = _seconds(scope, self._timeout_s)
        if seconds is None:
            stated = Headers(scope=scope)[TIMEOUT_HEADER][:60]
            message = (
                f"{TIMEOUT_HEADER}: not a whole number of milliseconds above 0, got {stated!r}"
            )
            await self._refuse(scope, 400, message, None)(scope, receive, send)
            return
        scope["seconds"] = seconds
        scope["deadline"] = time.monotonic() + seconds
        try:
            bounded = unpacked(_bounded(receive, scope), scope, _max_bytes(scope))
        except HTTPException as error:
            refused = self._refuse(scope, error.status_code, error.detail, error.headers)
            await refused(scope, receive, send)
            return
        self._under_way[kind] += 1
        try:
            await self._app(scope, bounded, _read_in_time(send, self._timeout_s))
        except NotRead:  # an answer without an end: the server closes the connection
            log.warning("a client has not read its answer within %g s", self._timeout_s)
        finally:
            self._under_way[kind] -= 1


def _read_in_time(send: Send, seconds: float) -> Send:
    """`send`, which raises NotRead where it waits for longer: the client's buffers are full."""

    async def sent(message: AsgiMessage) -> None:
        try:
            async with asyncio.timeout(seconds):
                await send(message)
        except TimeoutError:
            raise NotRead from None

    return sent


def _seconds(scope: Scope, timeout_s: float) -> float | None:
    """How long the request may take; None where the header that says it cannot be read."""
    stated = Headers(scope=scope).get(TIMEOUT_HEADER)
    if stated is None:
        return timeout_s
    if not MILLISECONDS.fullmatch(stated):
        return None
    return min(timeout_s, int(stated) / 1000)


def _max_bytes(scope: Scope) -> int:
    """The largest body that this caller may send, in bytes."""
    caller_limit: int | None = scope["caller"].limits.body_bytes
    return min(MAX_BYTES, caller_limit or MAX_BYTES)


def _too_large(max_bytes: int) -> str:
    return f"the body is too large; the limit is {max_bytes:,} bytes"


def _content_length(scope: Scope) -> int:
    """The Content-Length of the request in bytes; 0 without one."""
    value = dict(scope.get("headers", ())).get(b"content-length", b"")
    if not value.isdigit():
        return 0
    return int(value)


def _bounded(receive: Receive, scope: Scope) -> Receive:
    """`receive`, which raises an HTTPException once more bytes have come in than the caller may
    send.

    Also if the body is not there by the deadline; what comes after it, a disconnect, may be later.
    """
    max_bytes = _max_bytes(scope)
    received = 0
    is_whole = False

    async def counted() -> AsgiMessage:
        nonlocal received, is_whole
        if is_whole:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), scope["deadline"] - time.monotonic())
        except TimeoutError:
            raise HTTPException(408, "the body did not come in time") from None
        is_whole = not message.get("more_body", False)
        received += len(message.get("body", b""))
        if received > max_bytes:
            raise HTTPException(413, _too_large(max_bytes))
        return message

    return counted
