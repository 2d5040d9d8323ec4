"""The HTTP app around an engine: every wire format's routes, access, limits, errors and observers.

Knows nothing of what the formats say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from fastapi import FastAPI

from serve.api import admin, probes, reviews
from serve.api.access import Access
from serve.api.catalogue import Catalogue
from serve.api.engine_service import EngineService
from serve.api.errors import ErrorResponses
from serve.api.formats import check
from serve.api.formats.table import WIRE_FORMATS
from serve.api.input.limits import MAX_REQUESTS, POLICIES, BoundedBodies, PlainRequests
from serve.api.keeping import CheckKeeper
from serve.api.observe.metrics import EngineCollector, Metrics
from serve.api.observe.record import Observer
from serve.api.observe.requests import ObservedRequests
from serve.api.watch import watch
from serve.engine.engines import CheckEngine
from serve.engine.thread.engine_thread import TIMEOUT_S
from serve.policy.rule_set import RuleSet
from serve.registry.reviews import ReviewStore
from serve.registry.source import RolloutSource
from serve.tenants.tenant_file import Tenants

TITLE = "Centurion"
DESCRIPTION = "Policy rules, one prefill, one verdict each."


def create_app(
    engine: CheckEngine,
    timeout_s: float = TIMEOUT_S,
    *,
    rule_sets: Mapping[str, RuleSet] | None = None,
    tenants: Tenants | None = None,
    observers: Sequence[Observer] = (),
    is_watching: bool = False,
    source: RolloutSource | None = None,
    review_store: ReviewStore | None = None,
    policies: int = POLICIES,
) -> FastAPI:
    """The server around an engine, which it drives from a thread of its own while it runs.

    `rule_sets` are of the engine's rules. Without `tenants` whoever reaches it may ask everything.
    `observers` are told of every check, and closed with the server. While it `is_watching`, what is
    published is served by itself. The `source` says what of each rule is to be served. What is kept
    for review goes into the `review_store`. Without tenants a request may state so many `policies`.
    """
    app = FastAPI(
        title=TITLE,
        description=DESCRIPTION,
        lifespan=_lifespan,
        redirect_slashes=False,  # a client that does not follow would read no verdict
    )
    cards = dict(engine.rules)  # as they are now: the service keeps them so
    app.state.metrics = Metrics(cards)
    # The counters last: what another observer fails to note is not answered, so not counted.
    observers = (*observers, app.state.metrics)
    keeper = None
    if review_store is not None:
        keeper = CheckKeeper(review_store, app.state.metrics.reviews_dropped)
    app.state.service = EngineService(engine, timeout_s, observers, cards, source, keeper)
    app.state.is_watching = is_watching
    catalogue = Catalogue(cards, rule_sets or {})
    put_in_front(app, catalogue, tenants, timeout_s, app.state.metrics, policies=policies)
    formats = [wire_format.router for wire_format in WIRE_FORMATS.values()]
    for router in (*formats, probes.router, admin.router, reviews.router):
        app.include_router(router)
    return app


def put_in_front(
    app: FastAPI,
    catalogue: Catalogue,
    tenants: Tenants | None,
    timeout_s: float,
    metrics: Metrics,
    max_requests: int | None = None,
    policies: int = POLICIES,
) -> None:
    """Put in front of all routes what every request passes: it is counted, its sender identified,
    its size and time bounded, and errors answered in its format.

    `max_requests` may be under way at once, by default MAX_REQUESTS.
    """
    errors = ErrorResponses(WIRE_FORMATS, fallback=check.FORMAT)
    errors.handle_all(app)
    refuse = errors.refusal
    app.add_middleware(BoundedBodies, refuse=refuse, timeout_s=timeout_s, max_requests=max_requests)
    most = max_requests or MAX_REQUESTS
    app.add_middleware(
        Access,
        catalogue=catalogue,
        tenants=tenants,
        refuse=refuse,
        max_requests=most,
        policies=policies,
    )
    app.add_middleware(PlainRequests, refuse=refuse)
    # Added last, it is the first to see a request.
    app.add_middleware(ObservedRequests, metrics=metrics, format_of=errors.name_of)


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Take checks until the server stops."""
    service: EngineService = app.state.service
    service.start()
    await service.adopt()
    metrics: Metrics = app.state.metrics
    collector = EngineCollector(service.thread, metrics.rules)
    metrics.registry.register(collector)
    watching = None
    if app.state.is_watching:
        watching = asyncio.create_task(watch(service))
    yield
    if watching is not None:
        watching.cancel()
    metrics.registry.unregister(collector)
    await asyncio.to_thread(service.close)
