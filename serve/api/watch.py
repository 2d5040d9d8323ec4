"""Looks whether other weights of rules are to be served, and has them served. Knows nothing
of HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import defaultdict
from dataclasses import dataclass

from starlette.exceptions import HTTPException

from guard.errors import GuardError
from serve.api.service import CheckService
from serve.engine.refusals import Overloaded
from serve.registry.rollout import ENFORCE, Rollout

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
LOOKS_PER_FILE_LOOK = 4  # at new rules' files, and at trials
FIRST_PAUSE_S = 4.0
MAX_PAUSE_S = 300.0  # before what there is no room for is tried again


@dataclass
class WatchedRule:
    """What the looks at a rule and the tries to serve it have found."""

    # What is to be served, if that is another than is served; of a new rule's file when it changed.
    found: Rollout | int | None = None
    refused: Rollout | int | None = None
    pause_s: float = 0.0  # before what there was no room for is tried again
    not_before: float = 0.0  # by time.monotonic

    @property
    def is_due(self) -> bool:
        return self.found != self.refused and time.monotonic() >= self.not_before


async def watch(service: CheckService, interval_s: float = INTERVAL_S) -> None:
    """Look every `interval_s` seconds, until cancelled.

    What the registry says is served at once; a new rule's file, where a reader judges it, once two
    looks find it the same: before, it may still be copied. What cannot be served is not tried
    again, and the log says why; what there is no room for, after a pause, which doubles each time:
    a cluster holds its checks for every try. Why a look fails is logged once.
    """
    watched: defaultdict[str, WatchedRule] = defaultdict(WatchedRule)
    logged: str | None = None  # why a look failed
    known = set(service.cards)  # rules that are not new
    for rule, changed_ns in service.unserved().items():
        watched[rule].refused = changed_ns  # until its file changes
    for look in itertools.count():
        await asyncio.sleep(interval_s)
        try:
            sees_files = look % LOOKS_PER_FILE_LOOK == 0
            if sees_files:
                await service.watch_trials()
            due = await asyncio.to_thread(_look, service, watched)
            if sees_files:
                due += await asyncio.to_thread(_new_rules, service, watched, known)
        except Exception as error:  # rules that another thread changed meanwhile, for example
            if repr(error) != logged:
                log.exception("whether versions were published is seen %g s later", interval_s)
            logged = repr(error)
            continue
        for rule in due:
            is_there = rule in service.cards or rule not in known
            if is_there and watched[rule].is_due:
                await _serve(service, rule, watched[rule])


def _look(service: CheckService, watched: defaultdict[str, WatchedRule]) -> list[str]:
    """The rules of which another version is to be served."""
    due: list[str] = []
    for rule in list(service.cards):
        try:
            wanted = service.wanted(rule)
        except GuardError:  # it has no folder
            continue
        if wanted != service.rollouts.get(rule):
            watched[rule].found = wanted
            due.append(rule)
    return due


def _new_rules(
    service: CheckService, watched: defaultdict[str, WatchedRule], known: set[str]
) -> list[str]:
    """The rules that are not served, and whose files two looks found the same. One that was served
    is `known`: whoever removed it does not want it back.
    """
    known |= service.cards.keys()
    new: list[str] = []
    for rule, changed_ns in service.unserved().items():
        if rule in known:
            continue
        before, watched[rule].found = watched[rule].found, changed_ns
        if before == changed_ns:
            new.append(rule)
    return new


async def _serve(service: CheckService, rule: str, state: WatchedRule) -> None:
    """Serve the rule as it is to be now; the log says what came of it."""
    pause_s, state.pause_s = 2 * (state.pause_s or FIRST_PAUSE_S / 2), 0.0
    try:
        card, rollout = await service.serve(rule), service.rollouts.get(rule)
        log.info("the rule %s is served by %s%s", rule, card.version[:12], _modes(rollout))
    except Overloaded as error:
        state.pause_s = min(MAX_PAUSE_S, pause_s)
        state.not_before = time.monotonic() + state.pause_s
        log.warning("the rule %s is put off for %g s: %s", rule, state.pause_s, error)
    except GuardError as error:
        state.refused = state.found
        log.error("the rule %s is served as before: %s", rule, error)
    except Exception as error:  # a rule that was removed meanwhile, for example
        if isinstance(error, HTTPException) and rule not in service.cards:
            state.refused = state.found  # a new rule that cannot be judged; the log says why
            return
        log.exception("the rule %s is served as before", rule)


def _modes(rollout: Rollout | None) -> str:
    """What of a rule is not enforced, for the log."""
    said = ""
    if rollout is not None and rollout.mode != ENFORCE:
        said = f" in the mode {rollout.mode}"
    if rollout is not None and rollout.trial is not None:
        said += f", beside it {rollout.trial.version[:12]}: {rollout.trial.mode}"
    return said
