"""Looks whether rules were trained again, and has them served by their new weights. Knows nothing
of HTTP.
"""

from __future__ import annotations

import asyncio
import logging

from guard.card import read_card
from guard.errors import GuardError
from serve.api.service import CheckService

log = logging.getLogger(__name__)

INTERVAL_S = 2.0


async def watch(service: CheckService, interval_s: float = INTERVAL_S) -> None:
    """Look every `interval_s` seconds, until cancelled. Weights that cannot be served are tried
    once; the log says why.
    """
    refused: set[tuple[str, str]] = set()
    while True:
        await asyncio.sleep(interval_s)
        for rule, sha256 in await asyncio.to_thread(_trained_again, service):
            if (rule, sha256) in refused:
                continue
            try:
                await service.replace(rule)
                log.info("the rule %s is served by its new weights", rule)
            except GuardError as error:
                refused.add((rule, sha256))
                log.error("the rule %s is served as before: %s", rule, error)


def _trained_again(service: CheckService) -> list[tuple[str, str]]:
    """The rules whose folders hold other weights than are served, and which."""
    changed: list[tuple[str, str]] = []
    for rule, card in service.cards.items():
        try:
            sha256 = read_card(service.folder(rule)).weights_sha256
        except (GuardError, OSError):  # no folder of its own, or one that is being written
            continue
        if sha256 != card.weights_sha256:
            changed.append((rule, sha256))
    return changed
