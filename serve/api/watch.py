"""Looks whether rules were trained again, and has them served by their new weights. Knows nothing
of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from guard.card import Card, read_card
from guard.errors import GuardError
from serve.engine.thread import Overloaded

log = logging.getLogger(__name__)

INTERVAL_S = 2.0


class ChangeableRules(Protocol):
    """What serves rules, and can serve one by other weights: one server, or several together."""

    @property
    def cards(self) -> Mapping[str, Card]:
        """Of the rules that are served, by name."""
        ...

    def folder(self, rule: str) -> Path:
        """Where training leaves a rule's weights. Raises GuardError if it has no folder."""
        ...

    async def serve(self, rule: str) -> Card:
        """Serve a rule by its weights as they are in its folder now. Raises GuardError."""
        ...


async def watch(service: ChangeableRules, interval_s: float = INTERVAL_S) -> None:
    """Look every `interval_s` seconds, until cancelled. What cannot be served is tried once, and
    the log says why; what the engine has no room for now, again.
    """
    refused: dict[str, Card] = {}
    while True:
        await asyncio.sleep(interval_s)
        for rule, card in (await asyncio.to_thread(_trained_again, service)).items():
            if refused.get(rule) == card or rule not in service.cards:
                continue
            try:
                await service.serve(rule)
                log.info("the rule %s is served by its new weights", rule)
            except Overloaded as error:
                log.warning("the rule %s is not replaced yet: %s", rule, error)
            except GuardError as error:
                refused[rule] = card
                log.error("the rule %s is served as before: %s", rule, error)
            except Exception:  # a rule that was removed meanwhile, for example
                log.exception("the rule %s is served as before", rule)


def _trained_again(service: ChangeableRules) -> dict[str, Card]:
    """The rules whose folders hold other cards than are served, of other weights or calibrated
    anew, and those cards.
    """
    changed: dict[str, Card] = {}
    for rule, served in list(service.cards.items()):
        try:
            card = read_card(service.folder(rule))
        except (GuardError, OSError):  # no folder of its own, or one that is being written
            continue
        if card != served:
            changed[rule] = card
    return changed
