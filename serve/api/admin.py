"""What administrators ask.

    POST /admin/rules/{rule}   the rule was trained again: serve it by its weights as they are now

The new weights are loaded, checked and asked once before the rule changes hands, between two
batches: no check is dropped, and none gets a verdict of one version by the threshold of the other.
Weights that cannot be served are status 409, and the rule is served as before.
"""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from guard.errors import GuardError
from serve.api.access import Caller
from serve.api.service import CheckService
from serve.engine.thread import Overloaded

log = logging.getLogger(__name__)

router = APIRouter()


class ReplacedRule(BaseModel):
    """What answers the rule now, and what did before."""

    rule: str
    weights_sha256: str
    threshold: float
    weights_sha256_before: str


@router.post("/admin/rules/{rule}")
async def replace(rule: str, request: Request) -> ReplacedRule:
    """Serve a rule by its weights as they are in its folder now."""
    before = Caller.of(request).catalogue.card(rule).weights_sha256
    try:
        card = await CheckService.of(request).replace(rule)
    except Overloaded:
        raise
    except GuardError as error:
        log.error("the rule %s is served as before: %s", rule, error)
        problem = "its new weights cannot be served, the server's log says why; it is as before"
        raise HTTPException(409, f"{rule}: {problem}") from error
    return ReplacedRule(
        rule=rule,
        weights_sha256=card.weights_sha256,
        threshold=card.threshold,
        weights_sha256_before=before,
    )
