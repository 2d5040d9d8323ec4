"""What listens for a cluster: access and limits, and each check on to the replica that has it.

The caller's key, the size of the body and the time it may take are looked at here, for all replicas
together; the rest is said by the replica, whose response is passed on as it is. Rules change here
(`rules.py`). Knows nothing of Ray and of what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from serve.api import admin
from serve.api.access import Access, Caller
from serve.api.app import FORMATS
from serve.api.catalogue import Catalogue
from serve.api.errors import ErrorResponses
from serve.api.formats import check
from serve.api.limits import MAX_REQUESTS, TIMEOUT_HEADER, BoundedBodies
from serve.api.observe.metrics import Metrics
from serve.api.observe.requests import REQUEST_ID, ObservedRequests
from serve.api.service import POLL_S
from serve.api.watch import watch
from serve.cluster.messages import RelayedRequest, RelayedResponse
from serve.cluster.pool import ReplicaLost, Replicas
from serve.cluster.rules import ClusterRules
from serve.cluster.session import SessionKeys
from serve.cluster.sums import SummedMetrics, merged
from serve.engine.thread import CLOSING_S, TIMEOUT_S, too_late
from serve.policy.rule_set import RuleSet
from serve.tenants.tenant_file import Tenants

STREAM = "/v1/check/stream"
NO_STREAM = (
    "replicas take no body that is still being written; send the growing text to /v1/check "
    "instead, as guarded_stream of serve.client does: its replica computes only what is new"
)
PROBE_S = 5.0  # that replicas may take to say how they are
LOST_S = 120.0  # without any replica: nobody expects one to come back
CALLS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def create_ingress(
    replicas: Replicas,
    rules: ClusterRules,
    timeout_s: float = TIMEOUT_S,
    *,
    rule_sets: Mapping[str, RuleSet] | None = None,
    tenants: Tenants | None = None,
    is_watching: bool = False,
    most_replicas: int = 1,
) -> FastAPI:
    """The app that listens for these replicas, `most_replicas` at most.

    The other options are those of `serve.api.app.create_app`.
    """
    app = FastAPI(lifespan=_lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = rules  # what `serve/api/admin.py` asks
    app.state.is_watching = is_watching
    metrics = Metrics({})
    ingress = Ingress(replicas, rules, timeout_s, metrics)
    errors = ErrorResponses(FORMATS, fallback=check)
    errors.handle_all(app)
    catalogue = Catalogue(rules.cards, rule_sets or {})
    max_requests = MAX_REQUESTS * most_replicas
    app.add_middleware(
        BoundedBodies, refuse=errors.response, timeout_s=timeout_s, max_requests=max_requests
    )
    app.add_middleware(
        Access,
        catalogue=catalogue,
        tenants=tenants,
        refuse=errors.response,
        max_requests=max_requests,
    )
    app.add_middleware(ObservedRequests, metrics=metrics, format_of=errors.name_of)
    app.include_router(admin.router)
    handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/healthz": ingress.healthz,
        "/readyz": ingress.readyz,
        "/health": ingress.readyz,
        "/metrics": ingress.metrics,
    }
    for path, handler in handlers.items():
        app.add_route(path, handler, methods=["GET"])
    app.add_route(STREAM, _no_stream, methods=["POST"])
    app.add_route("/{path:path}", ingress.pass_on, methods=CALLS)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    watching = None
    if app.state.is_watching:
        watching = asyncio.create_task(watch(app.state.service))
    yield
    if watching is not None:
        watching.cancel()


async def _no_stream(request: Request) -> Response:
    raise HTTPException(501, NO_STREAM)


class Ingress:
    """Passes requests on to replicas, and says how they are. For one event loop."""

    def __init__(
        self, replicas: Replicas, rules: ClusterRules, timeout_s: float, metrics: Metrics
    ) -> None:
        self._replicas = replicas
        self._rules = rules
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._sums = SummedMetrics()
        self._keys = SessionKeys()
        self._last_running = time.monotonic()

    async def pass_on(self, request: Request) -> Response:
        """The response of the replica that has the request's conversation.

        Raises Overloaded if there is none in time.
        """
        deadline = request.scope.get("deadline", time.monotonic() + self._timeout_s)
        relayed = await _asked(request)
        key = ""
        if relayed.method == "POST":
            tenant = Caller.of(request).tenant
            key = self._keys.key(relayed, tenant.name if tenant else "")
        async with self._rules.answering(deadline - time.monotonic()) as version:
            if relayed.method == "POST":
                left_ms = max(1, round((deadline - time.monotonic()) * 1000))
                relayed = relayed.with_header(TIMEOUT_HEADER, str(left_ms))
            asking = asyncio.ensure_future(self._replicas.ask(relayed, key, version))
            answered = await _answer(request, asking, deadline)
        response = Response(answered.body, answered.status)
        response.raw_headers = list(answered.headers)
        return response

    async def healthz(self, request: Request) -> Response:
        """200 while checks are answered, or will be once replicas are started again."""
        with contextlib.suppress(ReplicaLost):
            if await self._replicas.running():
                self._last_running = time.monotonic()
        return _status(time.monotonic() < self._last_running + LOST_S)

    async def readyz(self, request: Request) -> Response:
        """200 while any replica would take one more check."""
        try:
            states = await self._replicas.each("ready", within_s=PROBE_S)
        except ReplicaLost:
            return _status(False)
        return _status(any(state.value for state in states))

    async def metrics(self, request: Request) -> Response:
        """The metrics of all replicas, added up."""
        expositions = {}
        for answer in await self._replicas.each("metrics", within_s=PROBE_S):
            expositions[answer.replica] = answer.value
        registry = merged(self._metrics.registry, self._sums.families(expositions))
        accept = request.headers.get("accept", "")
        content, content_type = self._metrics.exposition(accept, registry)
        return Response(content, headers={"content-type": content_type})


async def _asked(request: Request) -> RelayedRequest:
    """The request, once its body is there. It has the id that the ingress knows it by."""
    scope = request.scope
    headers = tuple((bytes(key), bytes(value)) for key, value in scope["headers"])
    relayed = RelayedRequest(
        scope["method"], scope["path"], scope["query_string"], headers, await request.body()
    )
    return relayed.with_header(REQUEST_ID, scope["facts"].request_id)


async def _answer(
    request: Request, asking: asyncio.Future[RelayedResponse], deadline: float
) -> RelayedResponse:
    """The answer, unless its time is over or its sender is gone. Raises Overloaded."""
    try:
        while not asking.done():
            await asyncio.wait([asking], timeout=POLL_S)
            # A replica itself ends a late check; what it says of that is waited for.
            if not asking.done() and time.monotonic() > deadline + CLOSING_S:
                raise too_late()
            if not asking.done() and await request.is_disconnected():
                raise ReplicaLost("the caller is gone")
        return asking.result()
    finally:
        asking.cancel()


def _status(is_ok: bool) -> JSONResponse:
    if is_ok:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "down"}, status_code=503)
