"""All rules as an on-call person reads them; and one rule, with its versions and what people decide
about them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from guard.errors import GuardError
from guard.weights.card import Card
from serve.api import admin
from serve.api.access import Caller
from serve.api.observe.traffic import ALL, HOURS, LEAST_JUDGED, QUARTER, Counted, Series
from serve.api.service import CheckService
from serve.console.site import TOKEN, Console, done, page, pages
from serve.registry.registry import RegisteredRule, Registry
from serve.registry.rollout import SHOWN_DIGITS

router = pages()

DECISIONS: Mapping[str, tuple[Callable[..., Awaitable[object]], type[BaseModel]]] = {
    "publish": (admin.publish, admin.DecisionBody),
    "rollback": (admin.roll_back, admin.DecisionBody),
    "mode": (admin.set_mode, admin.ModeBody),
}
MODES = ("shadow", *(f"canary:{percent}%" for percent in (1, 5, 10, 25, 50)), "enforce", "off")
MOST_UNJUDGED = 0.05  # of the last hour's checks, before somebody should look


class SeenVersion(NamedTuple):
    """A version that judges, and what it did in the last 24 hours."""

    version: str
    mode: str
    series: Series


class SeenRule(NamedTuple):
    """A rule's champion, then the version on trial, and why somebody should look at the rule."""

    rule: str
    versions: Sequence[SeenVersion]
    reasons: Sequence[str]


def seen_versions(service: CheckService, rule: str, counted: Counted) -> list[SeenVersion]:
    """The champion, and the version on trial behind it."""
    rolled_out = admin.rolled_out(service, rule)
    versions: list[SeenVersion] = []
    for judging in (rolled_out.champion, rolled_out.trial):
        if judging is not None:
            series = counted.get((rule, judging.version)) or Series.empty()
            versions.append(SeenVersion(judging.version, judging.mode, series))
    return versions


def judged_before(
    versions: Sequence[SeenVersion], rule: str, counted: Counted
) -> SeenVersion | None:
    """The version that judged most in these 24 hours of those that judge no longer."""
    now = {version.version for version in versions}
    before = {name: series for (of, name), series in counted.items() if of == rule}
    gone = [name for name in before if name not in now and before[name].day.checks]
    if not gone:
        return None
    most = max(gone, key=lambda name: before[name].day.checks)
    return SeenVersion(most, "before", before[most])


def decided(registry: Registry, cards: Mapping[str, Card]) -> Iterator[tuple[str, str]]:
    """Of each rule what its last decision, or one that is not carried out, asks of people."""
    last = {event.version: event for event in registry.events() if event.kind != "registered"}
    known = registry.rules()
    for rule, card in cards.items():
        named = RegisteredRule.of(card)
        if named not in known:
            continue
        ids = {version.id for version in registry.versions(named)}
        event = max((last[name] for name in ids & last.keys()), key=lambda event: event.number)
        if event.kind == "aborted":
            what = f"The trial of {event.version[:SHOWN_DIGITS]} was taken back"
            yield rule, f"{what}: {event.reason}."
        rollout = registry.rollout(named)
        if rollout is not None and rollout.folder != registry.folder(card.version):
            yield rule, "Its champion is another version, which is not served here yet."


def undecided(champion: SeenVersion) -> Iterator[str]:
    """That a rule's champion decides nothing."""
    if champion.mode == "off":
        yield "It is off: nothing is judged."
    elif champion.mode == "shadow":
        yield "Its champion is in shadow: nothing is decided."


def noticed(version: SeenVersion) -> Iterator[str]:
    """What in a version's last hour somebody should look at."""
    name, hour = version.version[:SHOWN_DIGITS], version.series.hour
    unjudged = hour.share("unjudged") or 0.0
    if unjudged > MOST_UNJUDGED and hour.checks >= LEAST_JUDGED:
        yield f"{name} gave no verdict at {unjudged:.0%} of the last hour's checks."
    if (jump := version.series.jump()) is not None:
        before, now = jump
        yield f"{name} flagged {now:.1%} in the last hour, {before:.1%} in the 23 before."


@router.get("")
async def rules(request: Request) -> Response:
    """All rules, those that somebody should look at first."""
    service, registry = CheckService.of(request), Console.of(request).registry
    counted, cards = await service.counted(), dict(service.cards)
    asked_for: list[tuple[str, str]] = []
    problem = ""
    try:
        asked_for = await asyncio.to_thread(lambda: list(decided(registry, cards)))
    except GuardError as error:
        problem = str(error)
    listed: list[SeenRule] = []
    for rule in cards:
        versions = seen_versions(service, rule, counted)
        reasons = [reason for name, reason in asked_for if name == rule]
        reasons += undecided(versions[0])
        for version in versions:
            reasons += noticed(version)
        listed.append(SeenRule(rule, versions, reasons))
    listed.sort(key=lambda seen: (not seen.reasons, seen.rule))
    everything = counted.get(ALL) or Series.empty()
    return await page(
        request,
        "rules",
        rules=listed,
        problem=problem,
        is_ready=await service.is_ready(),
        per_second=everything.counts(-1).checks / (60 * QUARTER),
        since=Console.of(request).since,
    )


@router.get("/rules/{rule}")
async def describe(rule: str, request: Request, is_done: bool = False) -> Response:
    """One rule: its versions, what they flagged, and who decided what."""
    service = CheckService.of(request)
    Caller.of(request).catalogue.card(rule)
    counted = await service.counted()
    versions = seen_versions(service, rule, counted)
    before = judged_before(versions, rule, counted)
    now, hours = time.time(), range(HOURS - 1, -1, -1)
    return await page(
        request,
        "rule",
        rule=rule,
        seen=versions,
        charted=[*versions, before] if before else versions,
        told=await service.history(rule),
        modes=MODES,
        is_done=is_done,
        hours=[datetime.fromtimestamp(now - 3600 * (hour + 1), UTC) for hour in hours],
    )


@router.post("/rules/{rule}/{action}")
async def decide(rule: str, action: str, request: Request) -> Response:
    """What the API does. Its forms name the champion that they are to replace."""
    if action not in DECISIONS:
        raise HTTPException(404, "there is no such page")
    carry_out, body = DECISIONS[action]
    stated = {name: value for name, value in (await request.form()).items() if name != TOKEN}
    await carry_out(rule, body.model_validate(stated), request)
    return done(f"/rules/{rule}?is_done=1")
