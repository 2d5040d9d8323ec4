"""What administrators ask.

    GET    /admin/rules          the versions that judge, and their modes
    POST   /admin/rules/{rule}   serve it by its champion of now; also a new rule
    DELETE /admin/rules/{rule}   serve it no longer

Weights are loaded, checked and asked once before a rule changes hands, between two batches: no
check is dropped, and none gets a verdict of one version by the threshold of the other. Weights that
cannot be served are status 409, and all is served as before. So is removing a rule that a rule set
names, or the last one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from guard.errors import GuardError
from serve.api.access import Caller
from serve.api.service import CheckService
from serve.engine.refusals import Overloaded
from serve.registry.rollout import ENFORCE

log = logging.getLogger(__name__)

router = APIRouter()


class ChangedRule(BaseModel):
    """What answers the rule now, and what did before; null where nothing does or did."""

    rule: str
    version: str | None = None
    threshold: float | None = None
    version_before: str | None = None


class JudgingVersion(BaseModel):
    """A version that judges, and its mode (docs/operation.md, "Modes")."""

    version: str
    mode: str


class RolledOutRule(BaseModel):
    """A rule's champion, and the version on trial beside it; null if there is none."""

    rule: str
    champion: JudgingVersion
    trial: JudgingVersion | None = None


@router.get("/admin/rules")
async def rules(request: Request) -> list[RolledOutRule]:
    """What judges: of each rule its champion, and the version on trial."""
    service = CheckService.of(request)
    listed: list[RolledOutRule] = []
    for rule, card in service.cards.items():
        mode, trial = ENFORCE, None  # of a rule that is part of a merged base
        if rule in service.rollouts:
            rollout = service.without_taken_back(service.rollouts[rule])
            mode, trial = rollout.mode, rollout.trial
        champion = JudgingVersion(version=card.version, mode=str(mode))
        listed.append(RolledOutRule(rule=rule, champion=champion))
        if trial is not None:
            listed[-1].trial = JudgingVersion(version=trial.version, mode=str(trial.mode))
    return listed


@router.post("/admin/rules/{rule}")
async def serve(rule: str, request: Request) -> ChangedRule:
    """Serve a rule by its weights as they are in its folder now."""
    before = Caller.of(request).catalogue.rules.get(rule)
    with _refused(rule, "its weights cannot be served"):
        card = await CheckService.of(request).serve(rule)
    version_before = before.version if before else None
    return ChangedRule(
        rule=rule, version=card.version, threshold=card.threshold, version_before=version_before
    )


@router.delete("/admin/rules/{rule}")
async def remove(rule: str, request: Request) -> ChangedRule:
    """Stop serving a rule."""
    catalogue = Caller.of(request).catalogue
    catalogue.card(rule)
    for name, rule_set in catalogue.rule_sets.items():
        if rule in rule_set.rules:
            raise HTTPException(409, f"the rule set {name!r} has the rule {rule!r}")
    with _refused(rule, "it cannot be removed"):
        card = await CheckService.of(request).remove(rule)
    return ChangedRule(rule=rule, version_before=card.version)


@contextlib.contextmanager
def _refused(rule: str, problem: str) -> Iterator[None]:
    """Answer what the engine refuses with 409; the log gets the message, which may name paths."""
    try:
        yield
    except Overloaded:
        raise
    except GuardError as error:
        log.error("the rule %s: %s: %s", rule, problem, error)
        why = f"{rule}: {problem}, the server's log says why; all is as before"
        raise HTTPException(409, why) from error
