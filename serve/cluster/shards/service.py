"""Checks by several shards: each shard judges its own rules.

A check asks all shards of its rules at the same time. It joins their verdicts into one Check. If a
shard does not answer, its rules are unjudged and have a reason. The other shards' verdicts stand.
In each shard one replica has the conversation, so each shard computes it once.

A served rule stays on its shard and changes there alone. Knows nothing of formats.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.exceptions import HTTPException

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.weights.card import Card, read_card
from serve.api.access import Caller
from serve.api.errors import retry_after_s
from serve.api.observe.metrics import Metrics
from serve.api.observe.record import Observer
from serve.api.service import POLL_S, CheckService, FindTrained, not_trained
from serve.cluster.front.session import SESSION_HEADER, conversation_key
from serve.cluster.messages import ReplicaAnswer, ReplicaLost
from serve.cluster.shards.placement import place_for
from serve.cluster.shards.shard import Shard
from serve.engine import Check, Refusal
from serve.engine.codes import Code, code_of
from serve.engine.refusals import CallerGone, TooLate, not_served, too_late
from serve.engine.score import joined
from serve.engine.thread.engine_thread import CLOSING_S

TWICE = "Delete the notes of what is served (served-*.json) and start again"

CountTokens = Callable[[str], int]


class ClusterService(CheckService):
    """Checks by the replicas of these shards. For one event loop. Nobody else changes the rules.

    `text_tokens` counts tokens as the replicas do. `order`: the order in which rules are listed.
    `find_trained` finds the folder of a rule's weights as they are to be served. The `observers`
    are told of every check, then the `metrics`.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        text_tokens: CountTokens,
        order: Iterable[str] = (),
        find_trained: FindTrained = lambda rule, served: None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.shards = tuple(shards)
        self._text_tokens = text_tokens
        self._find_trained = find_trained
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Card]] = set()  # under way, or waiting for it
        self._shard_of: dict[str, int] = {}
        for number, shard in enumerate(self.shards):
            for rule in shard.cards:
                if rule in self._shard_of:
                    raise GuardError("two shards have the rule", got=rule, remedy=TWICE)
                self._shard_of[rule] = number
        self._served: dict[str, Card] = {}
        for rule in dict.fromkeys((*order, *self._shard_of)):
            if rule in self._shard_of:
                self._served[rule] = self._shard(rule).cards[rule]
        self.metrics = Metrics(self._served)
        super().__init__(self._served, (*observers, self.metrics))

    def text_tokens(self, text: str) -> int:
        return self._text_tokens(text)

    def by_shard(self, rules: Iterable[str]) -> dict[int, list[str]]:
        """The rules by the number of their shard. Rules that are not served are left out."""
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
        """As `CheckService.serve`. A new rule comes to a shard of its base that has few rules."""
        return await self._to_its_end(self._serve(rule))

    async def remove(self, rule: str) -> Card:
        """As `CheckService.remove`. The last rule of a shard cannot be removed."""
        return await self._to_its_end(self._remove(rule))

    async def _to_its_end(self, change: Coroutine[Any, Any, Card]) -> Card:
        """The outcome of a change. The change goes on even if its caller is gone.

        After half a change the replicas, the note and this object would contradict each other.
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
            self._served[rule] = await self.shards[number].serve(rule)
            self._shard_of[rule] = number
            return self._served[rule]

    async def _remove(self, rule: str) -> Card:
        async with self._changing:
            if rule not in self._shard_of:
                raise HTTPException(404, f"the rule {rule!r} is not served")
            shard = self._shard(rule)
            if len(shard.cards) == 1 < len(self.shards):
                problem = f"{rule!r} is the last rule of its shard"
                raise HTTPException(409, f"{problem}; start the server with fewer of them")
            card = await shard.remove(rule)
            del self._shard_of[rule], self._served[rule]
            return card

    def _shard(self, rule: str) -> Shard:
        return self.shards[self._shard_of[rule]]

    async def _place_for(self, rule: str) -> int:
        """The shard for a new rule. Raises HTTPException 404 for a rule that is not trained."""
        folder = await asyncio.to_thread(self._find_trained, rule, None)
        if folder is None:
            raise not_trained(rule, self._served)
        model = (await asyncio.to_thread(read_card, folder)).model
        candidates: list[int] = []
        for number, shard in enumerate(self.shards):
            if any(card.model == model for card in shard.cards.values()):
                candidates.append(number)
        counts = [len(shard.cards) for shard in self.shards]
        # If no shard serves the rule's base, any shard will refuse the rule.
        return place_for(rule, counts, candidates or range(len(self.shards)))

    async def _answer(
        self,
        request: Request,
        messages: Sequence[Message],
        rules: Sequence[str],
        cache_salt: str | None,
    ) -> Check:
        if not rules:  # an empty check must not read as "allow"
            remedy = "Name a rule that is served, or leave the rules out to ask all"
            raise GuardError("there is no rule to check", remedy=remedy)
        caller = Caller.of(request)
        session = request.headers.get(SESSION_HEADER, "")
        tenant = caller.tenant.name if caller.tenant else ""
        key = conversation_key(messages, cache_salt, session, tenant)
        salt = caller.salted(cache_salt)
        deadline: float = request.scope["deadline"]
        by_shard = self.by_shard(rules)
        asking: dict[int, asyncio.Task[ReplicaAnswer]] = {}
        for number, names in by_shard.items():
            check = self.shards[number].check(messages, names, salt, key, deadline)
            asking[number] = asyncio.create_task(check)
        try:
            await all_done(request, asking.values(), deadline)
            return _joined(request, rules, by_shard, asking)
        finally:  # nobody needs unfinished checks any more
            for task in asking.values():
                task.cancel()


async def all_done(
    request: Request, asking: Iterable[asyncio.Future[Any]], deadline: float
) -> None:
    """Wait for all answers until the request's time is over, and `patience_s` longer.

    A replica ends a late check itself, and its own reason is better than ours. Raises CallerGone.
    """
    waiting = set(asking)
    until = deadline + patience_s(request)
    while waiting and (left_s := until - time.monotonic()) > 0:
        _, waiting = await asyncio.wait(waiting, timeout=min(POLL_S, left_s))
        if waiting and await request.is_disconnected():
            raise CallerGone("the caller is gone")


def patience_s(request: Request) -> float:
    """How many seconds longer than a request's time we wait for a replica's own reason.

    At most as long as the request itself has, and at least two of a replica's looks at the clock.
    """
    seconds: float = request.scope.get("seconds", CLOSING_S)
    return min(CLOSING_S, max(2 * POLL_S, seconds))


def _joined(
    request: Request,
    rules: Sequence[str],
    by_shard: Mapping[int, Sequence[str]],
    asking: Mapping[int, asyncio.Task[ReplicaAnswer]],
) -> Check:
    """Join the shards' checks into one. If none answered, raise the failure with the longest wait
    before a retry.
    """
    checks: list[Check] = []
    failures: list[GuardError] = []
    refused: dict[str, Refusal] = {}
    for number, task in asking.items():
        try:
            answer = _replica_answer(task)
        except GuardError as failure:
            failures.append(failure)
            refused |= _refusals(by_shard[number], str(failure), code_of(failure))
        else:
            checks.append(answer.value)
            request.scope["replicas"].append(answer.replica)
    if failures and not checks:
        raise max(failures, key=retry_after_s)
    served_rules = set(itertools.chain.from_iterable(by_shard.values()))
    removed = [rule for rule in rules if rule not in served_rules]  # while the request came in
    refused |= _refusals(removed, "it is served no longer", "not_served")
    checks.append(Check((), refused, 0, 0, 0.0))
    return joined(rules, checks)


def _replica_answer(task: asyncio.Task[ReplicaAnswer]) -> ReplicaAnswer:
    """The answer of a shard's replica. Raises its error, or TooLate if it did not answer.

    The error's class decides how the metrics count it.
    """
    if not task.done():
        raise too_late()
    answer = task.result()
    if answer.error is None:
        return answer
    if answer.code == "too_late":
        raise TooLate(answer.error)
    if answer.code != "overloaded":
        raise GuardError(answer.error)
    failure = ReplicaLost(answer.error)
    failure.retry_after_s = answer.retry_after_s
    raise failure


def _refusals(rules: Iterable[str], why: str, code: Code) -> dict[str, Refusal]:
    return {rule: Refusal(rule, why, code) for rule in rules}
