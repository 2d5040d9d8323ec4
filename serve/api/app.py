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

from serve.api.calls import CallsUnderWay
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
) -> FastAPI:
    """The server around an engine, which it drives from a thread of its own while it runs.

    `rule_sets` are of the engine's rules.
    """
    app = FastAPI(
        title="Centurion",
        description="Policy rules, one prefill, one verdict each.",
        lifespan=_lifespan,
    )
    app.state.service = CheckService(engine, timeout_s)
    app.state.catalogue = Catalogue(dict(engine.rules), rule_sets or {})
    app.state.calls = CallsUnderWay()
    errors = ErrorResponses(FORMATS, fallback=check)
    errors.handle_all(app)
    app.add_middleware(BoundedBodies, refuse=errors.response)
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
