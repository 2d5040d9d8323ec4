"""Clusters of replicas without a model, in this process and on Ray. Tests only."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
from fastapi import FastAPI

from serve.cluster.front.ingress import create_ingress
from serve.cluster.messages import RelayedRequest, RelayedResponse
from serve.cluster.pool import RelayedCheck, ReplicaAnswer, ReplicaLost, Replicas
from serve.cluster.replica import GuardReplica
from serve.cluster.shards.rules import ShardedRules
from serve.cluster.shards.shard import Shard
from serve.cluster.shards.shard_rules import ShardRules
from serve.cluster.size import ReplicaRange
from serve.cluster.snapshots import Snapshots
from tests.serve.cluster.words_engine import WordsStart, save_words, words

RULES = ("greeting", "manners")


def trained(root: Path, weights: bytes = b"first") -> dict[str, Path]:
    """A folder for each of RULES."""
    return {rule: save_words(root / rule, weights) for rule in RULES}


class LocalReplicas:
    """Replicas in this process, each with an app and an engine of its own. A `Replicas`."""

    def __init__(self, replicas: Sequence[GuardReplica]) -> None:
        self.replicas = list(replicas)
        self.keys: list[str] = []

    async def ask(self, relayed: RelayedRequest, key: str, version: str) -> RelayedResponse:
        return await self._of(key).ask(relayed, version)

    async def check(self, relayed: RelayedCheck, key: str, version: str) -> ReplicaAnswer:
        return await self._of(key).check(relayed, version)

    def _of(self, key: str) -> GuardReplica:
        self.keys.append(key)
        if not self.replicas:
            raise ReplicaLost("no replica is there")
        number = int(hashlib.sha256(key.encode()).hexdigest(), 16)
        return self.replicas[number % len(self.replicas)]

    async def each(
        self, method: str, *arguments: object, within_s: float, may_miss: bool = False
    ) -> list[ReplicaAnswer]:
        if not self.replicas:
            raise ReplicaLost("no replica is there")
        return [await getattr(replica, method)(*arguments) for replica in self.replicas]

    async def running(self) -> int:
        return len(self.replicas)


@contextlib.asynccontextmanager
async def local_replicas(snapshots: Snapshots, count: int = 2) -> AsyncIterator[LocalReplicas]:
    """Replicas of WordsEngine, started and closed."""
    async with contextlib.AsyncExitStack() as until_closed:
        replicas = []
        for number in range(count):
            replica = GuardReplica(f"replica-{number}", WordsStart(), snapshots)
            await replica.start()
            until_closed.push_async_callback(replica.close)
            replicas.append(replica)
        yield LocalReplicas(replicas)


def kept(snapshots: Snapshots, folders: Mapping[str, Path]) -> Snapshots:
    """The snapshots, with these folders served."""
    snapshots.write({rule: snapshots.keep(folder) for rule, folder in folders.items()})
    return snapshots


@contextlib.contextmanager
def ray_cluster(
    root: Path, size: ReplicaRange, folders: Mapping[str, Path]
) -> Iterator[tuple[FastAPI, Replicas]]:
    """The app in front of replicas of WordsEngine on Ray, and these replicas."""
    from serve.cluster.ray_pool import ray_replicas  # Ray, which quick tests do not have

    snapshots = kept(Snapshots(root / "served"), folders)
    with ray_replicas(size, WordsStart(), [snapshots], root / "ray") as (pool,):
        rules = ShardedRules([Shard(pool, ShardRules(pool, snapshots, folders))])
        yield create_ingress(rules, words, 30.0, most_replicas=size.high), pool


def body(text: str, *rules: str) -> dict[str, object]:
    """A check of one message."""
    request: dict[str, object] = {"messages": [{"role": "user", "content": text}]}
    if rules:
        request["rules"] = list(rules)
    return request


def alone(client: httpx.Client) -> httpx.Client:
    """Another client of the same server: threads that share one may close each other's connection,
    where many of them are idle.
    """
    address, timeout = client.base_url, client.timeout
    # To verify nobody: what that needs takes longer to load than the check.
    return httpx.Client(base_url=address, timeout=timeout, trust_env=False, verify=False)


def check_alone(client: httpx.Client, text: str) -> httpx.Response:
    """A check of one message over a connection of its own."""
    with alone(client) as own:
        return own.post("/v1/check", json=body(text))


def as_json(answered: RelayedResponse) -> dict[str, object]:
    """The body of a response."""
    content: dict[str, object] = json.loads(answered.body)
    return content
