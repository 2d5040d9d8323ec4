"""The rules of all shards: where each is, and how one changes, on its shard alone.

A rule stays on its shard as long as it is served. Knows nothing of HTTP but its statuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from guard.errors import GuardError
from guard.weights.card import Card, read_card
from serve.api.service import FindTrained, not_trained
from serve.cluster.shards.placement import place_for
from serve.cluster.shards.shard import Shard
from serve.engine.refusals import not_served

TWICE = "Delete the notes of what is served (served-*.json) and start again"


class ShardedRules:
    """What the shards serve. For one event loop; the only one who changes it.

    `order` is that in which rules are listed. `find_trained` finds the folder of a rule that is
    trained and not served.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        order: Iterable[str] = (),
        find_trained: FindTrained = lambda rule: None,
    ) -> None:
        self.shards = tuple(shards)
        self._find_trained = find_trained
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Card]] = set()  # under way, or waiting for it
        self._shard_of: dict[str, int] = {}
        for number, shard in enumerate(self.shards):
            for rule in shard.cards:
                if rule in self._shard_of:
                    raise GuardError("two shards have the rule", got=rule, remedy=TWICE)
                self._shard_of[rule] = number
        self._cards: dict[str, Card] = {}
        for rule in dict.fromkeys((*order, *self._shard_of)):
            if rule in self._shard_of:
                self._cards[rule] = self._shard(rule).cards[rule]

    @property
    def cards(self) -> Mapping[str, Card]:
        return self._cards

    def by_shard(self, rules: Iterable[str]) -> dict[int, list[str]]:
        """The served ones of these rules, by the number of their shard."""
        numbers: dict[int, list[str]] = {}
        for rule in rules:
            if rule in self._shard_of:
                numbers.setdefault(self._shard_of[rule], []).append(rule)
        return numbers

    def folder(self, rule: str) -> Path:
        if rule not in self._shard_of:
            raise not_served(rule)
        return self._shard(rule).folder(rule)

    async def serve(self, rule: str) -> Card:
        """As `CheckService.serve`: a new rule comes to a shard of its base with few rules."""
        return await self._to_its_end(self._serve(rule))

    async def remove(self, rule: str) -> Card:
        """As `CheckService.remove`: each shard keeps one rule."""
        return await self._to_its_end(self._remove(rule))

    async def _to_its_end(self, change: Coroutine[Any, Any, Card]) -> Card:
        """The outcome of a change, which goes on if whoever asked for it is gone.

        Of half a change replicas, the note and this object would each say something else.
        """
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _serve(self, rule: str) -> Card:
        async with self._changing:
            number = self._shard_of.get(rule)
            if number is None:
                number = await self._place_for(rule)
            self._cards[rule] = await self.shards[number].serve(rule)
            self._shard_of[rule] = number
            return self._cards[rule]

    async def _remove(self, rule: str) -> Card:
        async with self._changing:
            if rule not in self._shard_of:
                raise HTTPException(404, f"the rule {rule!r} is not served")
            shard = self._shard(rule)
            if len(shard.cards) == 1 < len(self.shards):
                problem = f"{rule!r} is the last rule of its shard"
                raise HTTPException(409, f"{problem}; start the server with fewer of them")
            card = await shard.remove(rule)
            del self._shard_of[rule], self._cards[rule]
            return card

    def _shard(self, rule: str) -> Shard:
        return self.shards[self._shard_of[rule]]

    async def _place_for(self, rule: str) -> int:
        """The shard that a new rule comes to. Raises HTTPException 404 if it is not trained."""
        folder = await asyncio.to_thread(self._find_trained, rule)
        if folder is None:
            raise not_trained(rule, self._cards)
        model = (await asyncio.to_thread(read_card, folder)).model
        candidates: list[int] = []
        for number, shard in enumerate(self.shards):
            if any(card.model == model for card in shard.cards.values()):
                candidates.append(number)
        counts = [len(shard.cards) for shard in self.shards]
        # If no shard serves the base, any of them refuses it.
        return place_for(rule, counts, candidates or range(len(self.shards)))
