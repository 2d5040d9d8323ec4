"""The HTTP app around an engine: the routes of every wire format, limits, errors and health.

    GET /health   200 while checks are served, else 503

Knows nothing of what the formats say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from serve.api.access import Access
from serve.api.catalogue import Catalogue
from serve.api.errors import ErrorResponses, WireFormat
from serve.api.formats import (
    agentgateway,
    check,
    detectors,
    litellm,
    moderations,
    openai_chat,
)
from serve.api.limits import BoundedBodies
from serve.api.service import CheckService
from serve.engine.mixed import CheckEngine
from serve.engine.thread import TIMEOUT_S
from serve.policy.rule_set import RuleSet
from serve.tenants.tenant_file import Tenants

FORMATS: dict[str, WireFormat] = {
    "check": check,
    "openai_chat": openai_chat,
    "moderations": moderations,
    "detectors": detectors,
    "litellm": litellm,
    "agentgateway": agentgateway,
}


def create_app(
    engine: CheckEngine,
    timeout_s: float = TIMEOUT_S,
    *,
    rule_sets: Mapping[str, RuleSet] | None = None,
    tenants: Tenants | None = None,
) -> FastAPI:
    """The server around an engine, which it drives from a thread of its own while it runs.

    `rule_sets` are of the engine's rules. Without `tenants` whoever reaches it may ask everything.
    """
    app = FastAPI(
        title="Centurion",
        description="Policy rules, one prefill, one verdict each.",
        lifespan=_lifespan,
    )
    app.state.service = CheckService(engine, timeout_s)
    errors = ErrorResponses(FORMATS, fallback=check)
    errors.handle_all(app)
    catalogue = Catalogue(dict(engine.rules), rule_sets or {})
    app.add_middleware(BoundedBodies, refuse=errors.response)
    # Added last, it is the first to see a request.
    app.add_middleware(Access, catalogue=catalogue, tenants=tenants, refuse=errors.response)
    for wire_format in FORMATS.values():
        app.include_router(wire_format.router)
    app.add_api_route("/health", health, methods=["GET"])
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Take checks until the server stops."""
    service: CheckService = app.state.service
    service.start()
    yield
    await asyncio.to_thread(service.close)


async def health(request: Request) -> JSONResponse:
    """Whether checks are served."""
    if CheckService.of(request).is_alive:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "down"}, status_code=503)
