"""Shards of replicas without a model, in this process and on Ray. Tests only."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from serve.api.app import create_app
from serve.cluster.front.ingress import create_ingress
from serve.cluster.pool import Replicas
from serve.cluster.shards.placement import placed, split
from serve.cluster.shards.rules import ShardedRules
from serve.cluster.shards.shard import Shard
from serve.cluster.shards.shard_rules import ShardRules
from serve.cluster.size import ReplicaRange
from serve.cluster.snapshots import Snapshots
from tests.serve.cluster.words_cluster import LocalReplicas, kept, local_replicas
from tests.serve.cluster.words_engine import WordsEngine, WordsStart, save_words, words
from tests.serve.serving import serving

RULES = tuple(f"rule_{letter}" for letter in "abcdef")
REPLICA = "x-guard-replica"
SHARDS = 2
ON = placed(RULES, SHARDS)  # the shard of each


def saved(root: Path, rules: Sequence[str] = RULES) -> dict[str, Path]:
    """A folder for each rule, with weights of its own."""
    return {rule: save_words(root / rule, rule.encode()) for rule in rules}


def rules_on(shard: int) -> list[str]:
    """The rules of a shard, in their order."""
    return [rule for rule in RULES if ON[rule] == shard]


def sharded(
    pools: Sequence[Replicas],
    snapshots: Sequence[Snapshots],
    folders: Mapping[str, Path],
    find_trained: Callable[[str], Path | None] = lambda rule: None,
) -> ShardedRules:
    """The rules of shards with these replicas."""
    shards: list[Shard] = []
    for pool, noted, some in zip(pools, snapshots, split(folders, len(pools)), strict=True):
        shards.append(Shard(pool, ShardRules(pool, noted, some, find_trained)))
    return ShardedRules(shards, folders, find_trained)


def split_snapshots(
    root: Path, folders: Mapping[str, Path], shards: int = SHARDS
) -> list[Snapshots]:
    """What each shard serves at first."""
    snapshots: list[Snapshots] = []
    for number, some in enumerate(split(folders, shards)):
        snapshots.append(kept(Snapshots(root / "served", f"shard-{number}.json"), some))
    return snapshots


def find_in(root: Path) -> Callable[[str], Path | None]:
    """Finds what is trained in a folder."""

    def find(rule: str) -> Path | None:
        return root / rule if (root / rule).is_dir() else None

    return find


class LocalShards:
    """Two shards of `count` replicas each, in this process, behind an ingress."""

    def __init__(self, root: Path, count: int = 2, **options: Any) -> None:
        self.root = root
        self.folders = saved(root)
        self._count = count
        self._snapshots = split_snapshots(root, self.folders)
        self.pools = [LocalReplicas([]) for _ in range(SHARDS)]
        self.rules = sharded(self.pools, self._snapshots, self.folders, find_in(root))
        self._app = create_ingress(self.rules, words, **({"timeout_s": 10.0} | options))

    @contextlib.contextmanager
    def client(self) -> Iterator[httpx.Client]:
        """A client of it. Replicas run in the ingress's event loop, so they start with it."""
        inner = self._app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with inner(app), contextlib.AsyncExitStack() as until_closed:
                for pool, snapshots in zip(self.pools, self._snapshots, strict=True):
                    started = local_replicas(snapshots, self._count)
                    replicas = await until_closed.enter_async_context(started)
                    pool.replicas = replicas.replicas
                yield

        self._app.router.lifespan_context = lifespan
        with serving(self._app) as client:
            yield client


@contextlib.contextmanager
def one_server(folders: Mapping[str, Path], **options: Any) -> Iterator[httpx.Client]:
    """A client of a server that has all rules in one engine."""
    with serving(create_app(WordsEngine(folders), 10.0, **options)) as client:
        yield client


@contextlib.contextmanager
def ray_shards(root: Path, size: ReplicaRange, folders: Mapping[str, Path]) -> Iterator[FastAPI]:
    """The app in front of shards of replicas on Ray."""
    from serve.cluster.ray_pool import ray_replicas  # Ray, which quick tests do not have

    snapshots = split_snapshots(root, folders)
    with ray_replicas(size, WordsStart(), snapshots, root / "ray") as pools:
        rules = sharded(pools, snapshots, folders, find_in(root))
        yield create_ingress(rules, words, 30.0, most_replicas=size.high)
