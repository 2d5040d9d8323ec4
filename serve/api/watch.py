"""Looks whether rules were trained again, and has them served by their new weights. Knows nothing
of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NamedTuple

from guard.errors import GuardError
from guard.weights.card import read_card
from serve.api.service import CheckService
from serve.engine.refusals import Overloaded

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
UNREAD_LOOKS = 2
MAX_PAUSE_S = 300.0  # before what there is no room for is tried again


async def watch(service: CheckService, interval_s: float = INTERVAL_S) -> None:
    """Look every `interval_s` seconds, until cancelled.

    A rule is served by its new files once two looks find them the same: before, they may still be
    copied. What cannot be served is tried again when its files are others, and the log says why;
    what there is no room for, after a pause, which doubles each time: a cluster holds its checks
    for every try. A card that cannot be read at two looks is not just being written: it is logged
    once, as is why a look fails.
    """
    replacements = Replacements(service, interval_s)
    before: dict[str, FilesOfRule] = {}  # what the last look found
    unread: dict[str, int] = {}  # the number of looks at which it could not be read
    logged: str | None = None  # why a look failed
    while True:
        await asyncio.sleep(interval_s)
        try:
            looked = await asyncio.to_thread(_look, service)
        except Exception as error:  # rules that another thread changed meanwhile, for example
            if repr(error) != logged:
                log.exception("whether rules were trained again is seen %g s later", interval_s)
            logged = repr(error)
            continue
        unread = {rule: unread.get(rule, 0) + 1 for rule in looked.unreadable}
        for rule, looks in unread.items():
            if looks == UNREAD_LOOKS:
                why = looked.unreadable[rule]
                log.error("the rule %s is served as before: %s", rule, why)
        for rule, files in looked.changed.items():
            is_being_copied = before.get(rule) != files
            if not is_being_copied and rule in service.cards and replacements.is_due(rule, files):
                await replacements.serve(rule, files)
        before = looked.changed


class Replacements:
    """Has rules served by new weights, and knows when one is to be tried again."""

    def __init__(self, service: CheckService, interval_s: float) -> None:
        self._service = service
        self._interval_s = interval_s
        self._refused: dict[str, FilesOfRule] = {}
        self._postponed: dict[str, Postponement] = {}

    def is_due(self, rule: str, files: FilesOfRule) -> bool:
        """Whether these files were not refused, and the rule is not put off."""
        postponed = self._postponed.get(rule)
        is_put_off = postponed is not None and time.monotonic() < postponed.until
        return self._refused.get(rule) != files and not is_put_off

    async def serve(self, rule: str, files: FilesOfRule) -> None:
        """Serve the rule by its weights as they are now; the log says what came of it."""
        postponed = self._postponed.pop(rule, None)
        try:
            await self._service.serve(rule)
            log.info("the rule %s is served by its new weights", rule)
        except Overloaded as error:
            pause_s = 2 * (postponed.pause_s if postponed else self._interval_s)
            pause_s = min(MAX_PAUSE_S, pause_s)
            self._postponed[rule] = Postponement(pause_s, time.monotonic() + pause_s)
            log.warning("the rule %s is put off for %g s: %s", rule, pause_s, error)
        except GuardError as error:
            self._refused[rule] = files
            log.error("the rule %s is served as before: %s", rule, error)
        except Exception:  # a rule that was removed meanwhile, for example
            log.exception("the rule %s is served as before", rule)


class Postponement(NamedTuple):
    """How long a rule is not tried again, and until when, by time.monotonic."""

    pause_s: float
    until: float


# Of each file its name, size and time of change in ns: what changes with its content.
FilesOfRule = frozenset[tuple[str, int, int]]


class WatchedFolders(NamedTuple):
    """The files of rules with other cards than are served, and why cards cannot be read."""

    changed: dict[str, FilesOfRule]
    unreadable: dict[str, str]


def _look(service: CheckService) -> WatchedFolders:
    look = WatchedFolders({}, {})
    for rule, served in list(service.cards.items()):
        try:
            folder = service.folder(rule)
        except GuardError:  # it has none
            continue
        try:
            states = [(path.name, path.stat()) for path in folder.iterdir()]
            card = read_card(folder)
        except (GuardError, OSError) as error:
            look.unreadable[rule] = str(error)
            continue
        if card != served:
            files = [(name, state.st_size, state.st_mtime_ns) for name, state in states]
            look.changed[rule] = frozenset(files)
    return look
