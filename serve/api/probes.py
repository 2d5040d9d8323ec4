"""What orchestrators and Prometheus ask, none of it about a check.

    GET /healthz   200 while this process can answer checks, or will once its engine is started
                   again; else 503: start the process again
    GET /readyz    200 while one more check would be taken now; else 503: send it elsewhere
    GET /metrics   Prometheus

Knows nothing of wire formats.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from serve.api.engine_service import EngineService
from serve.api.observe.metrics import Metrics

router = APIRouter()


@router.get("/healthz")
async def healthz(request: Request) -> JSONResponse:
    """200 while the engine works: not if it has failed for good or hangs in a batch."""
    return up_or_down(EngineService.of(request).thread.is_alive)


@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """200 while one more check would be taken."""
    return up_or_down(await EngineService.of(request).is_ready())


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics, in the format that the client accepts."""
    counts: Metrics = request.app.state.metrics
    content, content_type = counts.exposition(request.headers.get("accept", ""))
    return Response(content, headers={"content-type": content_type})


def up_or_down(is_ok: bool) -> JSONResponse:
    if is_ok:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "down"}, status_code=503)
