"""The engine as every wire format sees it: the rules that it serves, and checks.

Knows nothing of any format.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from fastapi import Request
from starlette.exceptions import HTTPException

from guard.card import Card
from guard.example import Message
from serve.api.errors import Unjudged
from serve.api.limits import TEXTS_AT_ONCE
from serve.engine import Check
from serve.engine.mixed import CheckEngine
from serve.engine.thread import TIMEOUT_S, EngineThread, too_late

POLL_S = 0.5  # how often a check looks whether its caller is still connected


class CheckService:
    """An engine, driven from a thread of its own between `start` and `close`.

    `rules` are the cards of what is served, by name. A check has `timeout_s` seconds.
    """

    def __init__(self, engine: CheckEngine, timeout_s: float = TIMEOUT_S) -> None:
        self.rules: Mapping[str, Card] = dict(engine.rules)
        self._engine = engine
        self._timeout_s = timeout_s
        self._thread: EngineThread

    @classmethod
    def of(cls, request: Request) -> CheckService:
        """The service of the app that handles `request`."""
        service: CheckService = request.app.state.service
        return service

    @property
    def is_alive(self) -> bool:
        """Whether checks are being answered."""
        return self._thread.is_alive

    def start(self) -> None:
        """Take checks."""
        self._thread = EngineThread(self._engine, self._timeout_s)

    def close(self) -> None:
        """Finish the checks under way and take no more. Does not close the engine."""
        self._thread.close()

    def not_served(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that are no rule of this service."""
        return [name for name in names if name not in self.rules]

    def card(self, rule: str) -> Card:
        """The card of a rule that is served. Raises HTTPException 404 if it is not."""
        if rule not in self.rules:
            raise HTTPException(404, f"the rule {rule!r} is not served; GET /v1/rules lists them")
        return self.rules[rule]

    async def check(
        self,
        request: Request,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Check:
        """Put a conversation to `rules` (default: all), as long as the sender of `request` waits.

        Raises GuardError if there is no verdict at all: too much work, too late, a failed batch.
        """
        future = self._thread.check(messages, rules, cache_salt=cache_salt)
        # Before that, the engine's thread itself ends a late check, unless it is amid a batch.
        deadline = time.monotonic() + self._timeout_s + POLL_S
        answer = asyncio.wrap_future(future)
        try:
            while not await _is_done(answer):
                if time.monotonic() > deadline:
                    raise too_late()
                if await request.is_disconnected():
                    self._thread.give_up(future)
            return await answer
        finally:  # whatever ends the wait, nobody needs what is not done by then
            self._thread.give_up(future)
            answer.cancel()

    async def check_each(
        self,
        request: Request,
        conversations: Sequence[Sequence[Message]],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[Check]:
        """A check for each conversation, TEXTS_AT_ONCE at a time. Raises as `check`."""
        room = asyncio.Semaphore(TEXTS_AT_ONCE)

        async def check_one(messages: Sequence[Message]) -> Check:
            async with room:
                return await self.check(request, messages, rules, cache_salt=cache_salt)

        tasks = [asyncio.ensure_future(check_one(messages)) for messages in conversations]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def judge_each(
        self,
        request: Request,
        conversations: Sequence[Sequence[Message]],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[Check]:
        """`check_each`, where every rule has a verdict. Raises Unjudged if one has none."""
        checks = await self.check_each(request, conversations, rules, cache_salt=cache_salt)
        for check in checks:
            if check.refused:
                raise unjudged(check)
        return checks


def violated(checks: Sequence[Check]) -> list[str]:
    """The rules that any check violates. Raises Unjudged if none is, and one has no verdict."""
    rules: dict[str, None] = {}
    for check in checks:
        for verdict in check.verdicts:
            if verdict.violates:
                rules[verdict.rule] = None
    for check in checks:
        if check.refused and not rules:
            raise unjudged(check)
    return list(rules)


def unjudged(check: Check) -> Unjudged:
    """How many rules of the check have no verdict, and why the first of them has none."""
    rule, refusal = next(iter(check.refused.items()))
    rules = len(check.verdicts) + len(check.refused)
    return Unjudged(f"{len(check.refused)} of {rules} rules; {rule}: {refusal.why}")


async def _is_done(answer: asyncio.Future[Check]) -> bool:
    """Wait for the answer, POLL_S at most; whether it is there."""
    done, _ = await asyncio.wait([answer], timeout=POLL_S)
    return bool(done)
