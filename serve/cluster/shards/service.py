"""A check asks all shards of its rules at the same time, and makes one Check of their verdicts.

A rule is unjudged, with the reason, if its shard does not answer; the verdicts of other shards
stand. Each shard has a replica of its own for a conversation, so each computes it once. Knows
nothing of formats.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fastapi import Request

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.weights.card import Card
from serve.api.access import Caller
from serve.api.errors import retry_after_s
from serve.api.observe.record import Observer
from serve.api.service import POLL_S, CheckService
from serve.cluster.front.session import SESSION_HEADER, conversation_key
from serve.cluster.pool import ReplicaAnswer, ReplicaLost
from serve.cluster.shards.rules import ShardedRules
from serve.engine import Check, Refusal
from serve.engine.codes import Code, code_of
from serve.engine.refusals import CallerGone, TooLate, too_late
from serve.engine.score import joined
from serve.engine.thread.engine_thread import CLOSING_S

CountTokens = Callable[[str], int]


class ClusterService(CheckService):
    """Checks by the replicas of these shards; `text_tokens` counts as they do."""

    def __init__(
        self, rules: ShardedRules, text_tokens: CountTokens, observers: Sequence[Observer] = ()
    ) -> None:
        super().__init__(rules.cards, observers)
        self._rules = rules
        self._text_tokens = text_tokens

    def text_tokens(self, text: str) -> int:
        return self._text_tokens(text)

    def folder(self, rule: str) -> Path:
        return self._rules.folder(rule)

    async def serve(self, rule: str) -> Card:
        return await self._rules.serve(rule)

    async def remove(self, rule: str) -> Card:
        return await self._rules.remove(rule)

    async def _answer(
        self,
        request: Request,
        messages: Sequence[Message],
        rules: Sequence[str],
        cache_salt: str | None,
    ) -> Check:
        if not rules:  # and no verdict either: an empty check must not read as "allow"
            remedy = "Name a rule that is served, or leave the rules out to ask all"
            raise GuardError("there is no rule to check", remedy=remedy)
        caller = Caller.of(request)
        session = request.headers.get(SESSION_HEADER, "")
        tenant = caller.tenant.name if caller.tenant else ""
        key = conversation_key(messages, cache_salt, session, tenant)
        salt = caller.salted(cache_salt)
        deadline: float = request.scope["deadline"]
        by_shard = self._rules.by_shard(rules)
        asking: dict[int, asyncio.Task[ReplicaAnswer]] = {}
        for number, names in by_shard.items():
            shard = self._rules.shards[number]
            check = shard.check(messages, names, salt, key, deadline)
            asking[number] = asyncio.create_task(check)
        try:
            await _all_done(request, asking.values(), deadline)
            return _joined(request, rules, by_shard, asking)
        finally:  # whatever ends the wait, unfinished checks are no longer needed
            for task in asking.values():
                task.cancel()


async def _all_done(
    request: Request, asking: Iterable[asyncio.Task[ReplicaAnswer]], deadline: float
) -> None:
    """Wait for all answers, as long as the request's sender does, and not much beyond its time.

    A replica itself ends a late check; its own words for that are waited for. Raises CallerGone.
    """
    waiting = set(asking)
    until = deadline + patience_s(request)
    while waiting and (left_s := until - time.monotonic()) > 0:
        _, waiting = await asyncio.wait(waiting, timeout=min(POLL_S, left_s))
        if waiting and await request.is_disconnected():
            raise CallerGone("the caller is gone")


def patience_s(request: Request) -> float:
    """Seconds beyond a request's time in which a replica's own words are waited for.

    Not more than the request itself has, but for a replica's two looks at the time.
    """
    seconds: float = request.scope.get("seconds", CLOSING_S)
    return min(CLOSING_S, max(2 * POLL_S, seconds))


def _joined(
    request: Request,
    rules: Sequence[str],
    by_shard: Mapping[int, Sequence[str]],
    asking: Mapping[int, asyncio.Task[ReplicaAnswer]],
) -> Check:
    """The shards' checks as one. If no shard has answered, raises the failure that is to be tried
    again last, or never.
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

    An error is of the class by which it is counted.
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
