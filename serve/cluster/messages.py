"""A request and its response as values, and an ASGI app that answers one without a socket.

Knows nothing of Ray and of what is asked.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace

from starlette.datastructures import Headers as HeadersByName
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Scope
from starlette.types import Message as AsgiMessage

log = logging.getLogger(__name__)

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class RelayedRequest:
    """A request whose body is whole. Header names are in lower case, as ASGI has them."""

    method: str
    path: str
    query: bytes = b""
    headers: Headers = ()
    body: bytes = b""

    def header(self, name: str) -> str:
        return HeadersByName(raw=list(self.headers)).get(name, "")

    def with_header(self, name: str, value: str) -> RelayedRequest:
        """The request with this header in the place of all of its name."""
        headers = MutableHeaders(raw=list(self.headers))
        headers[name] = value
        return replace(self, headers=tuple(headers.raw))


@dataclass(frozen=True)
class RelayedResponse:
    """A response whose body is whole."""

    status: int
    headers: Headers
    body: bytes


@dataclass
class _AsgiExchange:
    """What an app receives and sends while it answers."""

    body: bytes
    is_sent: bool = False
    is_answered: bool = False  # to the end
    status: int = 500
    headers: Headers = ()
    parts: list[bytes] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> AsgiMessage:
        # After the body nothing: the caller stays connected until the task is cancelled.
        if self.is_sent:
            await self.gone.wait()
        self.is_sent = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = tuple((bytes(key), bytes(value)) for key, value in message["headers"])
        elif message["type"] == "http.response.body":
            self.parts.append(message.get("body", b""))
            self.is_answered = not message.get("more_body", False)


async def answer_in_process(app: ASGIApp, relayed: RelayedRequest) -> RelayedResponse:
    """The response of `app`. A cancelled task is a caller who is gone.

    What the app raises behind a whole response, as Starlette does behind its error's, is logged.
    """
    exchange = _AsgiExchange(relayed.body)
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": relayed.method,
        "scheme": "http",
        "path": relayed.path,
        "raw_path": relayed.path.encode(),
        "query_string": relayed.query,
        "root_path": "",
        "headers": list(relayed.headers),
        "client": None,
        "server": None,
        "state": {},
    }
    try:
        await app(scope, exchange.receive, exchange.send)
    except Exception as error:
        if not exchange.is_answered:
            raise
        log.error("a request failed", exc_info=error)
    return RelayedResponse(exchange.status, exchange.headers, b"".join(exchange.parts))
