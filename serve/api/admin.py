"""What admins ask of the rules that are served and of their versions, each by its role.

Viewers read, publishers change. What is decided is recorded under their name and served at once;
where it cannot be served, that is recorded, and all is as before.

Weights are loaded, checked and asked once before a rule changes hands, between two batches: no
check is dropped, and none gets a verdict of one version by the threshold of the other. Weights that
cannot be served are status 409, and all is served as before. So is removing a rule that a rule set
names, or the last one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from guard.errors import GuardError
from serve.api.access import Caller, acting
from serve.api.formats.conversation import KnownKeys
from serve.api.service import CheckService
from serve.engine.refusals import Overloaded
from serve.registry.change import Action, RolloutChange
from serve.registry.history import RuleHistory
from serve.registry.rollout import ENFORCE, Mode

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


class DescribedRule(RolledOutRule, RuleHistory):
    """What judges of a rule, and all of its versions and events."""


class DecidedRule(RolledOutRule):
    """What a decision came to: the `version` it was about, and what judges now. With fewer than
    `approvals_needed` it is noted, and nothing else has changed.
    """

    version: str
    approvals: int
    approvals_needed: int


class DecisionBody(KnownKeys):
    """Which version is meant, by an alias or the beginning of its id, and why. Where a `champion`
    is named, by the beginning of its id, any other one is not replaced.
    """

    reason: Annotated[str, Field(pattern=r"\S", max_length=500)]
    version: Annotated[str, Field(max_length=64)] | None = None
    champion: Annotated[str, Field(max_length=64)] | None = None


class ModeBody(KnownKeys):
    """Which version is meant, by default the candidate, its mode from now on, and why."""

    reason: Annotated[str, Field(pattern=r"\S", max_length=500)]
    mode: Annotated[str, Field(examples=["canary:10%"])]
    version: Annotated[str, Field(max_length=64)] | None = None


@router.get("/admin/rules")
async def rules(request: Request) -> list[RolledOutRule]:
    """What judges: of each rule its champion, and the version on trial."""
    acting(request, "viewer")
    service = CheckService.of(request)
    return [rolled_out(service, rule) for rule in list(service.cards)]


@router.get("/admin/rules/{rule}")
async def describe(rule: str, request: Request) -> DescribedRule:
    """A rule's versions, newest first, and who decided what about them, and why."""
    acting(request, "viewer")
    service = CheckService.of(request)
    Caller.of(request).catalogue.card(rule)
    history = await service.history(rule)
    judging = rolled_out(service, rule)
    return DescribedRule(**dict(judging), **dict(history))


@router.post("/admin/rules/{rule}")
async def serve(rule: str, request: Request) -> ChangedRule:
    """Serve a rule by its champion of now."""
    acting(request, "publisher")
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
    acting(request, "publisher")
    catalogue = Caller.of(request).catalogue
    catalogue.card(rule)
    for name, rule_set in catalogue.rule_sets.items():
        if rule in rule_set.rules:
            raise HTTPException(409, f"the rule set {name!r} has the rule {rule!r}")
    with _refused(rule, "it cannot be removed"):
        card = await CheckService.of(request).remove(rule)
    return ChangedRule(rule=rule, version_before=card.version)


@router.post("/admin/rules/{rule}/publish")
async def publish(rule: str, body: DecisionBody, request: Request) -> DecidedRule:
    """Make a version the champion, by default the candidate, and serve it."""
    return await _decided(rule, request, "publish", **dict(body))


@router.post("/admin/rules/{rule}/rollback")
async def roll_back(rule: str, body: DecisionBody, request: Request) -> DecidedRule:
    """Make an earlier version the champion again, by default the previous one, and serve it."""
    return await _decided(rule, request, "rollback", **dict(body))


@router.post("/admin/rules/{rule}/mode")
async def set_mode(rule: str, body: ModeBody, request: Request) -> DecidedRule:
    """Set for which share of the conversations a version decides, by default the candidate."""
    try:
        mode = Mode.parse(body.mode)
    except GuardError as error:
        raise HTTPException(422, str(error)) from error
    return await _decided(rule, request, "mode", **dict(body) | {"mode": mode})


def rolled_out(service: CheckService, rule: str) -> RolledOutRule:
    """What judges of a rule that is served."""
    card = service.cards[rule]
    mode, trial = ENFORCE, None  # of a rule that is part of a merged base
    if rule in service.rollouts:
        rollout = service.without_taken_back(service.rollouts[rule])
        mode, trial = rollout.mode, rollout.trial
    champion = JudgingVersion(version=card.version, mode=str(mode))
    if trial is None:
        return RolledOutRule(rule=rule, champion=champion)
    beside = JudgingVersion(version=trial.version, mode=str(trial.mode))
    return RolledOutRule(rule=rule, champion=champion, trial=beside)


async def _decided(rule: str, request: Request, action: Action, **stated: Any) -> DecidedRule:
    actor, service = acting(request, "publisher"), CheckService.of(request)
    Caller.of(request).catalogue.card(rule)
    change = RolloutChange(action=action, actor=actor, **stated)
    with _refused(rule, "the version cannot be served"):
        prepared, approvals = await service.decide(rule, change)
    return DecidedRule(
        **dict(rolled_out(service, rule)),
        version=prepared.version.id,
        approvals=approvals,
        approvals_needed=prepared.approvals,
    )


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
