"""Which rules a shard serves, and how one changes: on all its replicas or on none.

Weights are copied and looked at first. Then new checks are held, those under way end, every replica
loads and tests the new weights, and checks go on: by the new ones if all replicas took them, else
by the old ones. Every check names the version of the rules that it is to be answered by, so a
replica that missed a change, because it was starting or had died, makes up for it before it
answers, or does not answer. Knows nothing of HTTP but its statuses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.exceptions import HTTPException

from guard.errors import GuardError
from guard.weights.card import Card, check_rule, load_card
from serve.api.service import FindTrained, not_trained
from serve.cluster.front.gate import Gate
from serve.cluster.pool import ReplicaAnswer, ReplicaLost, Replicas
from serve.cluster.snapshots import Snapshots, version_of
from serve.engine.refusals import Overloaded, not_served, too_late
from serve.engine.thread.engine_thread import TIMEOUT_S

log = logging.getLogger(__name__)

# The share of a check's time in which those under way end, else the change is put off. Those that
# are held meanwhile have the rest of theirs.
DRAIN_SHARE = 0.5
# A copy that is not served is kept for that long: a replica that is starting, or starts its engine
# again, may need it, and a rule may be served from it again.
UNUSED_S = 24 * 3600.0
SWITCH_S = 60.0  # seconds that a replica has to load and test new weights


class ShardRules:
    """What a shard serves, from which folders. For one event loop; the only one who changes it.

    `folders` are those of the rules that are served at the start, as training left them;
    `find_trained` finds the folder of another rule. A check has `timeout_s` seconds. Raises
    GuardError for weights that cannot be served.
    """

    def __init__(
        self,
        replicas: Replicas,
        snapshots: Snapshots,
        folders: Mapping[str, Path],
        find_trained: FindTrained = lambda rule: None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._replicas = replicas
        self._snapshots = snapshots
        self._folders = dict(folders)
        self._find_trained = find_trained
        self._drain_s = DRAIN_SHARE * timeout_s
        self._changing = asyncio.Lock()
        self._gate = Gate()
        self._served = snapshots.read()
        self.version = version_of(self._served)
        self.cards: dict[str, Card] = {}
        for rule, folder in self._served.items():
            self.cards[rule] = load_card(folder)

    @asynccontextmanager
    async def answering(self, within_s: float) -> AsyncIterator[str]:
        """A context for a check under way, with the version of the rules that answers it.

        Raises TooLate if a change takes longer than `within_s`.
        """
        try:
            passing = self._gate.passing(within_s)
            async with passing:
                yield self.version
        except TimeoutError:
            raise too_late() from None

    def folder(self, rule: str) -> Path:
        """Where training leaves a rule's weights. Raises GuardError for a rule without a folder."""
        if rule not in self._folders:
            raise not_served(rule)
        return self._folders[rule]

    async def serve(self, rule: str) -> Card:
        """As CheckService.serve, on all replicas; Overloaded for what is put off."""
        async with self._changing:
            folder = self._folders.get(rule)
            if folder is None:
                folder = await asyncio.to_thread(self._find_trained, rule)
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
            outcomes = await self._replicas.each("switch", rule, folder, within_s=SWITCH_S)
            refusals = [outcome for outcome in outcomes if outcome.error]
        except ReplicaLost as error:
            refusals = [ReplicaAnswer("a replica", error=str(error))]
        if not refusals:
            return
        try:
            await self._replicas.each("switch", rule, self._served.get(rule), within_s=SWITCH_S)
        except ReplicaLost as error:  # one that still loads is of no version until it is back
            log.error("not all replicas could be asked to serve %s as before: %s", rule, error)
        first = refusals[0]
        raise GuardError(f"{first.replica}: {first.error}", got=rule)
