"""Looks whether rules were trained again, and has them served by their new weights. Knows nothing
of HTTP.
"""

from __future__ import annotations

import asyncio
import logging

from guard.card import Card, read_card
from guard.errors import GuardError
from serve.api.service import CheckService
from serve.engine.thread import Overloaded

log = logging.getLogger(__name__)

INTERVAL_S = 2.0


async def watch(service: CheckService, interval_s: float = INTERVAL_S) -> None:
    """Look every `interval_s` seconds, until cancelled. What cannot be served is tried once, and
    the log says why; what the engine has no room for now, again.
    """
    refused: dict[str, Card] = {}
    while True:
        await asyncio.sleep(interval_s)
        for rule, card in (await asyncio.to_thread(_trained_again, service)).items():
            if refused.get(rule) == card:
                continue
            try:
                await service.serve(rule)
                log.info("the rule %s is served by its new weights", rule)
            except Overloaded as error:
                log.warning("the rule %s is not replaced yet: %s", rule, error)
            except GuardError as error:
                refused[rule] = card
                log.error("the rule %s is served as before: %s", rule, error)


def _trained_again(service: CheckService) -> dict[str, Card]:
    """The rules whose folders hold other cards than are served, of other weights or calibrated
    anew, and those cards.
    """
    changed: dict[str, Card] = {}
    for rule, served in service.cards.items():
        try:
            card = read_card(service.folder(rule))
        except (GuardError, OSError):  # no folder of its own, or one that is being written
            continue
        if card != served:
            changed[rule] = card
    return changed
