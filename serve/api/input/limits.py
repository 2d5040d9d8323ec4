"""How large a request may be, and how many may come at once. Knows nothing of what they ask."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from serve.api.input.encodings import check_encodings
from serve.engine.thread.engine_thread import MAX_OPEN, MAX_QUEUED
from serve.policy.logic import MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE

log = logging.getLogger(__name__)

MAX_MESSAGES = 10_000  # of a conversation; a message costs five tokens at least
MAX_RULES = 1_000  # of a check, with the policies that its request states
MAX_POLICY = 1_200  # characters of one
POLICIES = 100  # that a request may state, where there are no tenants and nothing else is said
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
MAX_TURNS = 500  # of a conversation whose violations are explained
CONSOLE_PATH = "/console"  # of people, also of those who have not said yet who they are
MAX_FORMS, MAX_FORM_BYTES = 32, 2**20  # that the console reads at once, beside all checks
# Its forms that need no session, whose number keeps nobody out who has one.
OPEN_PATHS = (f"{CONSOLE_PATH}/login", f"{CONSOLE_PATH}/logout")
MAX_LOGIN_BYTES, LOGIN_S = 4096, 5.0
STREAM_PATH = "/v1/check/stream"  # its bodies are written slowly
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

RequestKind = Literal["request", "stream", "console", "login"]

KINDS: tuple[RequestKind, ...] = get_args(RequestKind)

Refuse = Callable[[Scope, HTTPException], Response]  # in the words of the request's format


def route_path(scope: Scope) -> str:
    """The path that routes are found by: without what a proxy in front has before it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(f"{root}/"):
        return path[len(root) :]
    return path


def kind_of(scope: Scope) -> RequestKind:
    path = route_path(scope)
    if path == STREAM_PATH:
        return "stream"
    if path in OPEN_PATHS:
        return "login"
    if path.startswith(CONSOLE_PATH):
        return "console"
    return "request"


class NotRead(Exception):
    """The client does not read its answer."""


class PlainRequests:
    """ASGI middleware, in front of who may ask: a target with scheme and host is read as its path,
    and a body with both a length and chunks is refused, which a proxy may read as two requests.
    """

    def __init__(self, app: ASGIApp, refuse: Refuse) -> None:
        self._app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["path"].startswith(("http://", "https://")):
                scope["path"] = urlsplit(scope["path"]).path or "/"
            stated = Headers(scope=scope)
            if "content-length" in stated and "transfer-encoding" in stated:
                headers = {"connection": "close"}
                error = HTTPException(400, "a body has a length or comes in chunks", headers)
                await self._refuse(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BoundedBodies:
    """ASGI middleware that refuses large bodies before they are read, or as soon as they are large.

    The limit is MAX_BYTES, or the caller's own if that is less; what is packed is refused. So is a
    request while `max_requests`, by default MAX_REQUESTS, are under way. Streams count by
    themselves, up to MAX_STREAMS, and forms, up to MAX_FORMS: written slowly, they keep no other
    out.

    Body and checks together have `timeout_s` seconds from the head on, or what TIMEOUT_HEADER says:
    until `scope["deadline"]`, by time.monotonic. A stream moves that by `scope["seconds"]` a line.
    A client that reads nothing for `timeout_s` ends its request, and leaves its place to others.
    """

    def __init__(
        self, app: ASGIApp, refuse: Refuse, timeout_s: float, max_requests: int | None = None
    ) -> None:
        self._app = app
        self._refuse = refuse
        self._timeout_s = timeout_s
        self._max_requests = max_requests
        self._under_way = dict.fromkeys(KINDS, 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        kind = kind_of(scope)
        try:
            bounded = self._admitted(kind, scope, receive)
        except HTTPException as error:
            await self._refuse(scope, error)(scope, receive, send)
            return
        self._under_way[kind] += 1
        try:
            await self._app(scope, bounded, _read_in_time(send, self._timeout_s))
        except NotRead:  # an answer without an end: the server closes the connection
            log.warning("a client has not read its answer within %g s", self._timeout_s)
        finally:
            self._under_way[kind] -= 1

    def _admitted(self, kind: RequestKind, scope: Scope, receive: Receive) -> Receive:
        """The request's bounded body; `scope` has its deadline. Raises HTTPException."""
        own_limits = {"stream": MAX_STREAMS, "console": MAX_FORMS, "login": MAX_FORMS}
        limit = own_limits.get(kind, self._max_requests or MAX_REQUESTS)
        if self._under_way[kind] >= limit:
            raise HTTPException(503, TOO_MANY, RETRY_AFTER)
        most = {"console": MAX_FORM_BYTES, "login": MAX_LOGIN_BYTES}.get(kind, MAX_BYTES)
        max_bytes = min(most, scope["caller"].limits.body_bytes or most)
        stated = Headers(scope=scope).get("content-length", "")
        if stated.isdecimal() and int(stated) > max_bytes:
            raise _too_large(max_bytes)
        longest_s = min(self._timeout_s, LOGIN_S) if kind == "login" else self._timeout_s
        scope["seconds"] = _seconds(scope, longest_s)
        scope["deadline"] = time.monotonic() + scope["seconds"]
        check_encodings(scope)
        return _bounded(receive, scope, max_bytes)


def _read_in_time(send: Send, seconds: float) -> Send:
    """`send`, which raises NotRead where it waits for longer: the client's buffers are full."""

    async def sent(message: AsgiMessage) -> None:
        try:
            async with asyncio.timeout(seconds):
                await send(message)
        except TimeoutError:
            raise NotRead from None

    return sent


def _seconds(scope: Scope, timeout_s: float) -> float:
    """How long the request may take. Raises HTTPException 400 for a header that cannot be read."""
    stated = Headers(scope=scope).get(TIMEOUT_HEADER)
    if stated is None:
        return timeout_s
    if not MILLISECONDS.fullmatch(stated):
        problem = f"not a whole number of milliseconds above 0, got {stated[:60]!r}"
        raise HTTPException(400, f"{TIMEOUT_HEADER}: {problem}")
    return min(timeout_s, int(stated) / 1000)


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"the body is too large; the limit is {max_bytes:,} bytes")


def _bounded(receive: Receive, scope: Scope, max_bytes: int) -> Receive:
    """`receive`, which raises an HTTPException once more bytes than these have come in, and if the
    body is not there by the deadline. What comes after it, a disconnect, may be later.
    """
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
            raise _too_large(max_bytes)
        return message

    return counted
