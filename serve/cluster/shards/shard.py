"""A shard: replicas that serve the same rules. A rule changes on all of them or on none.

Weights are copied and looked at first. Then new checks are held, checks under way end, every
replica loads and tests the new weights, and checks go on: by the new weights if all replicas took
them, else by the old ones. Every check names the version of the rules that is to answer it. So a
replica that missed a change, because it was starting or had died, makes up for it before it
answers, or does not answer. Knows nothing of other shards, and nothing of HTTP but its statuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from starlette.exceptions import HTTPException

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.weights.card import Card, check_rule, load_card
from serve.api.service import FindTrained, not_trained
from serve.cluster.messages import CheckLost, RelayedCheck, ReplicaAnswer, ReplicaLost, Replicas
from serve.cluster.snapshots import Snapshots, version_of
from serve.engine.refusals import Overloaded, not_served, too_late
from serve.engine.thread.engine_thread import TIMEOUT_S


class Gate:
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
        """Go through. Raises TimeoutError if the gate is closed for longer than `within_s`."""
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

        Raises TimeoutError if that takes longer than `within_s`; the gate is then open as before.
        """
        async with self._closing:
            self._is_open.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self._is_empty.wait()
                yield
            finally:
                self._is_open.set()


log = logging.getLogger(__name__)

LOOK_S = 1.0  # seconds for which the last look at a shard's replicas counts
NOBODY, LATER = "no replica is there", "Try again in a few seconds"
# The share of a check's time in which checks under way end, else the change is put off. Checks that
# are held meanwhile have the rest of their time.
DRAIN_SHARE = 0.5
# A copy that is not served is kept for that long: a replica that is starting, or starts its engine
# again, may need it, and a rule may be served from it again.
UNUSED_S = 24 * 3600.0
SWITCH_S = 60.0  # seconds that a replica has to load and test new weights


class Shard:
    """Replicas, and from which folders they serve which rules. For one event loop; nobody else
    changes the rules.

    `folders` are those of the rules that are served at the start; `find_trained` finds the folder
    of a rule's weights as they are to be served now. A check has `timeout_s` seconds. Raises
    GuardError for weights that cannot be served.
    """

    def __init__(
        self,
        replicas: Replicas,
        snapshots: Snapshots,
        folders: Mapping[str, Path],
        find_trained: FindTrained = lambda rule, served: None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.replicas = replicas
        self._snapshots = snapshots
        self._folders = dict(folders)
        self._find_trained = find_trained
        self._drain_s = DRAIN_SHARE * timeout_s
        self._changing = asyncio.Lock()
        self._gate = Gate()
        self._is_lost = False
        self._looked_at = time.monotonic()
        self._served = snapshots.read()
        self.version = version_of(self._served)
        self.cards: dict[str, Card] = {}
        for rule, folder in self._served.items():
            self.cards[rule] = load_card(folder)

    async def check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str],
        cache_salt: str | None,
        key: str,
        deadline: float,
    ) -> ReplicaAnswer:
        """The Check of the replica that has the conversations of `key`, by one version of the
        rules; or why it has none.

        `deadline` is by time.monotonic. Raises Overloaded; so it does while no replica is there,
        whatever time is left: verdicts of other shards should not wait for one to start.
        """
        if self._is_lost and await self._look():
            raise ReplicaLost(NOBODY, remedy=LATER)
        async with self.answering(deadline - time.monotonic()) as version:
            within_s = deadline - time.monotonic()
            relayed = RelayedCheck(tuple(messages), tuple(rules), cache_salt, within_s)
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

    @contextlib.asynccontextmanager
    async def answering(self, within_s: float) -> AsyncIterator[str]:
        """A context for a check under way, with the version of the rules that answers it.

        Raises TooLate if a change takes longer than `within_s`.
        """
        try:
            async with self._gate.passing(within_s):
                yield self.version
        except TimeoutError:
            raise too_late() from None

    def folder(self, rule: str) -> Path:
        if rule not in self._folders:
            raise not_served(rule)
        return self._find_trained(rule, self.cards[rule]) or self._folders[rule]

    async def serve(self, rule: str) -> Card:
        """As CheckService.serve, on all replicas; Overloaded for a change that is put off."""
        async with self._changing:
            served = self.cards.get(rule)
            folder = await asyncio.to_thread(self._find_trained, rule, served)
            folder = folder or self._folders.get(rule)
            if folder is None:
                raise not_trained(rule, self.cards)
            copy = await asyncio.to_thread(self._snapshots.keep, folder)
            card = await asyncio.to_thread(load_card, copy)
            check_rule(card, rule, folder)
            await self._change(rule, copy)
            self._folders[rule] = folder
            self.cards[rule] = card
            await asyncio.to_thread(self._discard_copies)
            return card

    async def remove(self, rule: str) -> Card:
        """As CheckService.remove, on all replicas."""
        async with self._changing:
            if len(self.cards) == 1:
                raise HTTPException(409, f"{rule!r} is the last rule; stop the server instead")
            await self._change(rule, None)
            self._folders.pop(rule, None)
            return self.cards.pop(rule)

    def _discard_copies(self) -> None:
        """Delete copies that were refused or replaced; the change stands even if that fails."""
        try:
            self._snapshots.discard(UNUSED_S)
        except (GuardError, OSError) as error:
            log.error("copies that are no longer served could not be deleted: %s", error)

    async def _change(self, rule: str, folder: Path | None) -> None:
        """Have all replicas serve the rule from `folder`, or without one no longer.

        Raises GuardError if one refuses; all are then as before.
        """
        after = {name: copy for name, copy in self._served.items() if name != rule}
        if folder is not None:
            after[rule] = folder
        try:
            async with self._gate.closed(self._drain_s):
                await self._switch(rule, folder)
                await asyncio.to_thread(self._snapshots.write, after)
                self._served = after
                self.version = version_of(after)
        except TimeoutError:
            within = f"within {self._drain_s:g} s"
            problem = f"checks under way did not end {within}; the rule is as before"
            raise Overloaded(problem, remedy="Try again later") from None

    async def _switch(self, rule: str, folder: Path | None) -> None:
        try:
            outcomes = await self.replicas.each("switch", rule, folder, within_s=SWITCH_S)
            refusals = [outcome for outcome in outcomes if outcome.error]
        except ReplicaLost as error:
            refusals = [ReplicaAnswer("a replica", error=str(error))]
        if not refusals:
            return
        try:
            await self.replicas.each("switch", rule, self._served.get(rule), within_s=SWITCH_S)
        except ReplicaLost as error:  # one that still loads is of no version until it is back
            log.error("not all replicas could be asked to serve %s as before: %s", rule, error)
        first = refusals[0]
        raise GuardError(f"{first.replica}: {first.error}", got=rule)
