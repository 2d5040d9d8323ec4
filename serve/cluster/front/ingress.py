"""What listens for a cluster: access and limits, and each check on to the replicas that have it.

The caller's key, the size of the body and the time it may take are looked at here, for all replicas
together. A replica does the rest: a request is passed on whole, and so is its response. A stream,
whose body is still being written, is read here, and a replica asked for its verdicts
(`service.py`). Knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.datastructures import MutableHeaders
from starlette.routing import request_response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from serve.api import admin, reviews
from serve.api.access import Caller
from serve.api.app import put_in_front
from serve.api.catalogue import Catalogue
from serve.api.formats import stream
from serve.api.input.limits import MAX_REQUESTS, POLICIES, TIMEOUT_HEADER, route_path
from serve.api.observe.requests import REQUEST_ID
from serve.api.watch import watch
from serve.cluster.front.probes import ClusterProbes
from serve.cluster.front.session import SessionKeys
from serve.cluster.messages import REPLICA_HEADER, RelayedRequest, RelayedResponse
from serve.cluster.service import ClusterService, all_done
from serve.engine.refusals import too_late
from serve.engine.thread.engine_thread import TIMEOUT_S
from serve.policy.rule_set import RuleSet
from serve.tenants.tenant_file import Tenants

NO_FORMAT = "none"  # the wire format of a path that is no format's, by ErrorResponses.name_of


def create_ingress(
    service: ClusterService,
    timeout_s: float = TIMEOUT_S,
    *,
    rule_sets: Mapping[str, RuleSet] | None = None,
    tenants: Tenants | None = None,
    is_watching: bool = False,
    replicas: int = 1,
    policies: int = POLICIES,
) -> FastAPI:
    """The app that listens for the service's `replicas`.

    The other options are those of `serve.api.app.create_app`.
    """
    # The replicas describe all formats.
    undescribed: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(lifespan=_lifespan, redirect_slashes=False, **undescribed)
    app.state.service = service
    app.state.is_watching = is_watching
    app.add_middleware(NamedReplicas)
    catalogue = Catalogue(service.cards, rule_sets or {})
    most = MAX_REQUESTS * replicas
    put_in_front(app, catalogue, tenants, timeout_s, service.metrics, most, policies)
    app.include_router(admin.router)
    app.include_router(reviews.router)
    ClusterProbes(service).add_to(app)
    app.include_router(stream.router)
    # For all paths that are not its own, whatever the method.
    app.router.default = request_response(Relay(service, timeout_s).pass_on)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: ClusterService = app.state.service
    await service.adopt()
    watching = None
    if app.state.is_watching:
        watching = asyncio.create_task(watch(service))
    yield
    if watching is not None:
        watching.cancel()
    await asyncio.to_thread(service.close)


class NamedReplicas:
    """ASGI middleware that says in every response which replicas judged for it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on: `scope["replicas"]` takes their names."""
        scope["replicas"] = []

        async def named(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start" and scope["replicas"]:
                names = ", ".join(dict.fromkeys(scope["replicas"]))
                MutableHeaders(scope=message)[REPLICA_HEADER] = names
            await send(message)

        await self._app(scope, receive, named)


class Relay:
    """Passes requests on to the replicas. For one event loop."""

    def __init__(self, service: ClusterService, timeout_s: float) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self._keys = SessionKeys()

    async def pass_on(self, request: Request) -> Response:
        """The response of the replica that has the request's conversation.

        Raises Overloaded if there is none in time, and Unjudged for a reply whose call's id stood
        for two conversations.
        """
        deadline = request.scope.get("deadline", time.monotonic() + self._timeout_s)
        relayed = await _asked(request)
        key = ""
        if relayed.method == "POST":
            tenant = Caller.of(request).tenant
            key = self._keys.key(relayed, tenant.name if tenant else "")
        async with self._service.answering(deadline - time.monotonic()) as version:
            if relayed.method == "POST":
                left_ms = max(1, round((deadline - time.monotonic()) * 1000))
                relayed = relayed.with_header(TIMEOUT_HEADER, str(left_ms))
            asking = asyncio.ensure_future(self._service.replicas.ask(relayed, key, version))
            answered = await _answer(request, asking, deadline)
        response = Response(answered.body, answered.status)
        # Of a replica's own connection nothing is said to the client.
        fields = [field for field in answered.headers if field[0] != b"connection"]
        response.raw_headers = fields
        return response


async def _asked(request: Request) -> RelayedRequest:
    """The request, once its body is there. It has the id that the ingress knows it by.

    A body of another method than POST is not read: no replica would, and nothing bounds it. Nor is
    one of a path that is no format's: some of these are open to callers without a key, who could
    take all places with bodies that come slowly.
    """
    scope = request.scope
    headers = tuple((bytes(key), bytes(value)) for key, value in scope["headers"])
    body = b""
    if scope["method"] == "POST" and scope["facts"].wire_format != NO_FORMAT:
        body = await request.body()
    relayed = RelayedRequest(
        scope["method"], route_path(scope), scope["query_string"], headers, body
    )
    return relayed.with_header(REQUEST_ID, scope["facts"].request_id)


async def _answer(
    request: Request, asking: asyncio.Future[RelayedResponse], deadline: float
) -> RelayedResponse:
    """The answer, unless its time is over or its sender is gone. Raises Overloaded."""
    try:
        await all_done(request, asking, deadline)
        if not asking.done():
            raise too_late()
        return asking.result()
    finally:
        asking.cancel()
