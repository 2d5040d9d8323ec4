"""What the ingress and its replicas say to each other; an ASGI app that answers without a socket.

Knows nothing of Ray, of what is asked, and of how replicas are started and reached.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from starlette.datastructures import Headers as HeadersByName
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Scope
from starlette.types import Message as AsgiMessage

from guard.conversation.example import Message
from serve.engine.codes import Code
from serve.engine.refusals import Overloaded

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


REPLICA_HEADER = "x-guard-replica"  # which replica answered, in every response that one gave


class ReplicaLost(Overloaded):
    """No replica answered: there is none, or none takes more."""


class CheckLost(ReplicaLost):
    """The replica that was asked has not answered, and may have died of it.

    Nothing is asked a second time by itself: what kills a replica would kill the next one too.
    """

    retry_after_s = math.inf


@dataclass(frozen=True)
class ReplicaAnswer:
    """The answer of one replica. `error` says why it gave none, `code` the same in one word, and
    `retry_after_s` when it may be asked again: infinite for never.
    """

    replica: str
    value: Any = None
    error: str | None = None
    code: Code = "engine_failed"
    retry_after_s: float = math.inf


@dataclass(frozen=True)
class RelayedCheck:
    """A conversation, and what to judge it by, within `within_s` seconds from now."""

    messages: tuple[Message, ...]
    rules: tuple[str, ...]
    cache_salt: str | None
    within_s: float
    policies: tuple[str, ...] = ()


class Replicas(Protocol):
    """Any number of replicas of the same rules, which come and go."""

    async def ask(self, relayed: RelayedRequest, key: str, version: str) -> RelayedResponse:
        """The response of the replica that has the conversations of `key`; any, for an empty key.

        It answers by the rules of this `version` and no other. Cancelled, nobody needs the answer.
        Raises ReplicaLost.
        """
        ...

    async def check(self, relayed: RelayedCheck, key: str, version: str) -> ReplicaAnswer:
        """The Check of the replica that `ask` would ask; or why it has none. Raises as `ask`."""
        ...

    async def each(
        self, method: str, *arguments: Any, within_s: float, may_miss: bool = False
    ) -> list[ReplicaAnswer]:
        """The answers of all living replicas to a method of GuardReplica.

        Raises ReplicaLost if none answers, or one does not answer in time; where some `may_miss`,
        those that are late are left out.
        """
        ...

    async def running(self) -> int:
        """How many replicas there are now. Raises ReplicaLost if that cannot be known soon."""
        ...
