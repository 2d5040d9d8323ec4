"""Checks by replicas that serve the same rules. A rule changes on all of them or on none.

Weights are looked at first. Then new checks are held, checks under way end, every replica loads and
tests the new weights, and checks go on: by the new weights if all replicas took them, else by the
old ones. Every check names the version of the rules that is to answer it. So a replica that missed
a change, because it was starting or had died, makes up for it before it answers, or does not
answer. Knows nothing of formats.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.exceptions import HTTPException

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.weights.card import Card
from serve.api.access import Caller
from serve.api.keeping import CheckKeeper
from serve.api.observe.metrics import Metrics
from serve.api.observe.record import Observer
from serve.api.observe.traffic import Counted, added_up
from serve.api.service import POLL_S, CheckService, not_trained
from serve.api.session import SESSION_HEADER, conversation_key
from serve.cluster.messages import CheckLost, RelayedCheck, ReplicaAnswer, ReplicaLost, Replicas
from serve.cluster.note import ServedNote, version_card, version_of
from serve.engine import Check
from serve.engine.refusals import CallerGone, Overloaded, TooLate, not_served, too_late
from serve.engine.thread.engine_thread import CLOSING_S, TIMEOUT_S
from serve.registry.reviews import ReviewStore
from serve.registry.rollout import Rollout, TakenBack
from serve.registry.source import RolloutSource

log = logging.getLogger(__name__)

CountTokens = Callable[[str], int]

LOOK_S = 1.0  # seconds for which the last look at the replicas counts
NOBODY, LATER = "no replica is there", "Try again in a few seconds"
# The share of a check's time in which checks under way end, else the change is put off. Checks that
# are held meanwhile have the rest of their time.
DRAIN_SHARE = 0.5
SWITCH_S = 60.0  # seconds that a replica has to load and test new weights


class Barrier:
    """Open for any number at once, or closed for one alone, who waits until all are through."""

    def __init__(self) -> None:
        self._inside = 0
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._closing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def passing(self, within_s: float) -> AsyncIterator[None]:
        """Go through. Raises TimeoutError if it is closed for longer than `within_s`."""
        if not self._is_open.is_set():
            async with asyncio.timeout(within_s):
                await self._is_open.wait()
        self._inside += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._is_empty.set()

    @contextlib.asynccontextmanager
    async def closed(self, within_s: float) -> AsyncIterator[None]:
        """Hold whoever comes, once all who are inside are through.

        Raises TimeoutError if that takes longer than `within_s`; it is then open as before.
        """
        async with self._closing:
            self._is_open.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self._is_empty.wait()
                yield
            finally:
                self._is_open.set()


class ClusterService(CheckService):
    """Replicas, and what of which rules they serve. For one event loop; nobody else changes the
    rules.

    They serve what the note says. `text_tokens` counts tokens as the replicas do. The `source` says
    what of each rule is to be served now. A check has `timeout_s` seconds. The `observers` are told
    of every check, then the `metrics`. Raises GuardError for weights that cannot be served.
    """

    def __init__(
        self,
        replicas: Replicas,
        note: ServedNote,
        text_tokens: CountTokens,
        source: RolloutSource | None = None,
        observers: Sequence[Observer] = (),
        timeout_s: float = TIMEOUT_S,
        review_store: ReviewStore | None = None,
    ) -> None:
        self.replicas = replicas
        self._shared_note = note
        self._text_tokens = text_tokens
        self._drain_s = DRAIN_SHARE * timeout_s
        self._changing = asyncio.Lock()
        self._barrier = Barrier()
        self._is_lost = False
        self._looked_at = time.monotonic()
        self._noted = note.read()
        self.version = version_of(self._noted)
        self._served: dict[str, Card] = {}
        for rule, rollout in self._noted.items():
            self._served[rule] = version_card(rule, rollout.folder)
        self.metrics = Metrics(self._served)
        keeper = None
        if review_store is not None:
            keeper = CheckKeeper(review_store, self.metrics.reviews_dropped)
        super().__init__(self._served, (*observers, self.metrics), source, keeper)
        self.rollouts |= self._noted

    def text_tokens(self, text: str) -> int:
        return self._text_tokens(text)

    def wanted(self, rule: str) -> Rollout:
        if rule not in self.rollouts:
            raise not_served(rule)
        found = self._source.find(rule, self._served[rule])
        return self.without_taken_back(found or self.rollouts[rule])

    async def watch_trials(self) -> None:
        if not any(rollout.trial for rollout in self.rollouts.values()):
            return
        answers = await self.answers("taken_back")
        for over in itertools.chain.from_iterable(answer.value for answer in answers):
            self.take_back(over)

    async def is_ready(self) -> bool:
        return any(answer.value for answer in await self.answers("ready"))

    async def counted(self) -> Counted:
        counted = [answer.value for answer in await self.answers("counted")]
        return added_up([self.traffic.counted(), *counted])  # the own ones are of streams

    async def answers(self, method: str) -> list[ReplicaAnswer]:
        """What the replicas say that answer in time; nothing where they cannot be asked."""
        with contextlib.suppress(ReplicaLost):
            return await self.replicas.each(method, within_s=CLOSING_S, may_miss=True)
        return []

    async def serve(self, rule: str, *, as_before: bool = False) -> Card:
        """As `CheckService.serve`, on all replicas; Overloaded for a change that is put off."""
        async with self._changing:
            rollout = self.rollouts.get(rule) if as_before else None
            if rollout is None:
                rollout = await asyncio.to_thread(self._source.find, rule, self._served.get(rule))
            if rollout is None and rule not in self.rollouts:
                raise not_trained(rule, self._served)
            wanted = self.without_taken_back(rollout or self.rollouts[rule])
            card = await asyncio.to_thread(version_card, rule, wanted.folder)
            wanted = await self._with_whole_trial(rule, wanted)
            await self._change(rule, wanted)
            self.rollouts[rule] = self.without_taken_back(wanted)
            self._served[rule] = card
            return card

    async def _with_whole_trial(self, rule: str, rollout: Rollout) -> Rollout:
        """The rollout. A trial whose weights are damaged is over."""
        if rollout.trial is None:
            return rollout
        try:
            await asyncio.to_thread(version_card, rule, rollout.trial.folder)
        except GuardError as error:
            self.take_back(TakenBack(rule, rollout.trial, f"it cannot be served: {error}"))
        return self.without_taken_back(rollout)

    async def remove(self, rule: str) -> Card:
        """As `CheckService.remove`, on all replicas."""
        async with self._changing:
            if rule not in self._served:
                raise HTTPException(404, f"the rule {rule!r} is not served")
            if len(self._served) == 1:
                raise HTTPException(409, f"{rule!r} is the last rule; stop the server instead")
            await self._change(rule, None)
            del self.rollouts[rule]
            return self._served.pop(rule)

    async def _change(self, rule: str, rollout: Rollout | None) -> None:
        """Have all replicas serve the rule as this says, or without it no longer.

        Raises GuardError if one refuses; all are then as before.
        """
        after = dict(self._noted)
        after.pop(rule, None)
        if rollout is not None:
            after[rule] = rollout
        try:
            async with self._barrier.closed(self._drain_s):
                await self._switch(rule, rollout)
                await asyncio.to_thread(self._shared_note.write, after)
                self._noted = after
                self.version = version_of(after)
        except TimeoutError:
            within = f"within {self._drain_s:g} s"
            problem = f"checks under way did not end {within}; the rule is as before"
            raise Overloaded(problem, remedy="Try again later") from None

    async def _switch(self, rule: str, rollout: Rollout | None) -> None:
        try:
            outcomes = await self.replicas.each("switch", rule, rollout, within_s=SWITCH_S)
            refusals = [outcome for outcome in outcomes if outcome.error]
        except ReplicaLost as error:
            refusals = [ReplicaAnswer("a replica", error=str(error))]
        if not refusals:
            return
        try:
            await self.replicas.each("switch", rule, self._noted.get(rule), within_s=SWITCH_S)
        except ReplicaLost as error:  # one that still loads is of no version until it is back
            log.error("not all replicas could be asked to serve %s as before: %s", rule, error)
        first = refusals[0]
        raise GuardError(f"{first.replica}: {first.error}", got=rule)

    @contextlib.asynccontextmanager
    async def answering(self, within_s: float) -> AsyncIterator[str]:
        """A context for a check under way, with the version of the rules that answers it.

        Raises TooLate if a change takes longer than `within_s`.
        """
        try:
            async with self._barrier.passing(within_s):
                yield self.version
        except TimeoutError:
            raise too_late() from None

    async def _answer(
        self,
        request: Request,
        messages: Sequence[Message],
        rules: Sequence[str],
        cache_salt: str | None,
        policies: Sequence[str] = (),
    ) -> Check:
        caller = Caller.of(request)
        session = request.headers.get(SESSION_HEADER, "")
        tenant = caller.tenant.name if caller.tenant else ""
        key = conversation_key(messages, cache_salt, session, tenant)
        salt = caller.salted(cache_salt)
        deadline: float = request.scope["deadline"]
        left_s = deadline - time.monotonic()
        asked = RelayedCheck(tuple(messages), tuple(rules), salt, left_s, tuple(policies))
        asking = asyncio.create_task(self._relayed(asked, key, deadline))
        try:
            await all_done(request, asking, deadline)
            if not asking.done():
                raise too_late()
            answer = asking.result()
        finally:  # nobody needs an unfinished check any more
            asking.cancel()
        request.scope["replicas"].append(answer.replica)
        return _check_of(answer)

    async def _relayed(self, asked: RelayedCheck, key: str, deadline: float) -> ReplicaAnswer:
        """The answer of the replica that has the conversations of `key`. Raises Overloaded, also
        while no replica is there, whatever time is left.
        """
        if self._is_lost and await self._look():
            raise ReplicaLost(NOBODY, remedy=LATER)
        async with self.answering(deadline - time.monotonic()) as version:
            relayed = replace(asked, within_s=deadline - time.monotonic())
            asking = asyncio.ensure_future(self.replicas.check(relayed, key, version))
            try:
                while not asking.done():
                    await asyncio.wait([asking], timeout=LOOK_S)
                    if not asking.done() and await self._look():
                        raise CheckLost(NOBODY, remedy=LATER)
                return asking.result()
            finally:
                asking.cancel()

    async def _look(self) -> bool:
        """Whether there is no replica, as of the last look."""
        if time.monotonic() > self._looked_at + LOOK_S:
            self._looked_at = time.monotonic()
            with contextlib.suppress(ReplicaLost, TimeoutError):  # then nobody knows
                running = await asyncio.wait_for(self.replicas.running(), LOOK_S)
                self._is_lost = not running
        return self._is_lost


async def all_done(request: Request, asking: asyncio.Future[Any], deadline: float) -> None:
    """Wait for the answer until the request's time is over, and `patience_s` longer.

    A replica ends a late check itself, and its own reason is better than ours. Raises CallerGone.
    """
    until = deadline + patience_s(request)
    while not asking.done() and (left_s := until - time.monotonic()) > 0:
        await asyncio.wait([asking], timeout=min(POLL_S, left_s))
        if not asking.done() and await request.is_disconnected():
            raise CallerGone("the caller is gone")


def patience_s(request: Request) -> float:
    """How many seconds longer than a request's time we wait for a replica's own reason.

    At most as long as the request itself has, and at least two of a replica's looks at the clock.
    """
    seconds: float = request.scope.get("seconds", CLOSING_S)
    return min(CLOSING_S, max(2 * POLL_S, seconds))


def _check_of(answer: ReplicaAnswer) -> Check:
    """The check of an answer. Raises its error, of the class by which metrics count it."""
    if answer.error is None:
        check: Check = answer.value
        return check
    if answer.code == "too_late":
        raise TooLate(answer.error)
    if answer.code != "overloaded":
        raise GuardError(answer.error)
    failure = ReplicaLost(answer.error)
    failure.retry_after_s = answer.retry_after_s
    raise failure
