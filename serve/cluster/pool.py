"""The replicas as the ingress sees them. Knows nothing of how they are started and reached."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from guard.conversation.example import Message
from serve.cluster.messages import RelayedRequest, RelayedResponse
from serve.engine.codes import Code
from serve.engine.refusals import Overloaded

REPLICA_HEADER = "x-guard-replica"  # which replica answered, in every response that one gave


class ReplicaLost(Overloaded):
    """No replica answered: there is none, or none takes more."""


class CheckLost(ReplicaLost):
    """The replica that was asked has not answered, and may have died of it.

    Nothing is asked a second time by itself: what kills a replica would kill the next one too.
    """

    retry_after_s = math.inf


@dataclass(frozen=True)
class ReplicaAnswer:
    """The answer of one replica. `error` says why it gave none, `code` the same in one word, and
    `retry_after_s` when it may be asked again: infinite for never.
    """

    replica: str
    value: Any = None
    error: str | None = None
    code: Code = "engine_failed"
    retry_after_s: float = math.inf


@dataclass(frozen=True)
class RelayedCheck:
    """A conversation, and the rules to judge it by, within `within_s` seconds from now."""

    messages: tuple[Message, ...]
    rules: tuple[str, ...]
    cache_salt: str | None
    within_s: float


class Replicas(Protocol):
    """Any number of replicas of the same rules, which come and go."""

    async def ask(self, relayed: RelayedRequest, key: str, version: str) -> RelayedResponse:
        """The response of the replica that has the conversations of `key`; any, for an empty key.

        It answers by the rules of this `version` and no other. Cancelled, nobody needs the answer.
        Raises ReplicaLost.
        """
        ...

    async def check(self, relayed: RelayedCheck, key: str, version: str) -> ReplicaAnswer:
        """The Check of the replica that `ask` would ask; or why it has none. Raises as `ask`."""
        ...

    async def each(
        self, method: str, *arguments: Any, within_s: float, may_miss: bool = False
    ) -> list[ReplicaAnswer]:
        """The answers of all living replicas to a method of GuardReplica.

        Raises ReplicaLost if none answers, or one does not answer in time; where some `may_miss`,
        those that are late are left out.
        """
        ...

    async def running(self) -> int:
        """How many replicas there are now. Raises ReplicaLost if that cannot be known soon."""
        ...
