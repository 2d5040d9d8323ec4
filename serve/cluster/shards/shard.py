"""A shard: replicas that serve the same rules, and these rules. Knows nothing of other shards."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from guard.conversation.example import Message
from serve.cluster.pool import CheckLost, RelayedCheck, ReplicaAnswer, ReplicaLost, Replicas
from serve.cluster.shards.shard_rules import ShardRules

LOOK_S = 1.0  # seconds for which the last look at a shard's replicas counts
NOBODY, LATER = "no replica is there", "Try again in a few seconds"


class Shard:
    """Replicas, and what they serve. For one event loop."""

    def __init__(self, replicas: Replicas, rules: ShardRules) -> None:
        self.replicas = replicas
        self.rules = rules
        self._is_lost = False
        self._looked_at = time.monotonic()

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
        whatever time is left: others' verdicts should not wait for one to start.
        """
        if self._is_lost and await self._look():
            raise ReplicaLost(NOBODY, remedy=LATER)
        async with self.rules.answering(deadline - time.monotonic()) as version:
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
