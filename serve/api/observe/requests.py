"""Every request's id and its times: ASGI middleware around all the others. HEAD is read as GET.

The id is the caller's `x-request-id`, if it is one, else a new one; every response has it. Knows
nothing of bodies.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from serve.api.observe.metrics import Metrics
from serve.api.observe.record import RequestFacts

REQUEST_ID = "x-request-id"
WELL_FORMED = re.compile(r"[A-Za-z0-9._:-]{1,64}")  # too short to hold text, which an id must not


class ObservedRequests:
    """Names and counts requests. `format_of` says whose route a request is for."""

    def __init__(self, app: ASGIApp, metrics: Metrics, format_of: Callable[[Scope], str]) -> None:
        self._app = app
        self._metrics = metrics
        self._format_of = format_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; its facts are `scope["facts"]`."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        facts = scope["facts"] = _facts(scope, self._format_of(scope))
        status = 500
        if scope["method"] == "HEAD":  # of whose answer the server leaves the body out
            scope = {**scope, "method": "GET"}

        async def named(message: AsgiMessage) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = facts.request_id
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            latency_s = time.perf_counter() - began
            self._metrics.responded(facts.wire_format, status, latency_s)


def _facts(scope: Scope, wire_format: str) -> RequestFacts:
    headers = Headers(scope=scope)
    request_id = headers.get(REQUEST_ID, "")
    if not WELL_FORMED.fullmatch(request_id):
        request_id = uuid.uuid4().hex
    return RequestFacts(request_id, wire_format, traceparent=headers.get("traceparent"))
