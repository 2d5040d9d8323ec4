"""The servers that are measured: the real one on random adapters, and replicas without a model."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from guard.errors import GuardError
from guard.layout import Runs
from guard.recipe import Recipe
from serve.bench.cluster.words import WordsStart, save_words, words
from serve.bench.http.server import random_runs, rule_names, served_here, server_process
from serve.cluster.front.ingress import create_ingress
from serve.cluster.shards.rules import ShardedRules
from serve.cluster.shards.shard import Shard
from serve.cluster.shards.shard_rules import ShardRules
from serve.cluster.size import ReplicaRange
from serve.cluster.snapshots import Snapshots

REPLICAS = 2
FIXED = ReplicaRange(REPLICAS, REPLICAS)
BACK_S = 120.0  # how long a replica may take to come back


@dataclass(frozen=True)
class MeasuredServer:
    """A server's client, the weights that it serves, and their rules."""

    client: httpx.Client
    runs: Runs
    rules: Sequence[str]


@contextlib.contextmanager
def served(recipe: Recipe, rules: int, *options: str) -> Iterator[MeasuredServer]:
    """A server of `rules` random adapters, with these options."""
    with (
        random_runs(recipe, rules) as runs,
        server_process(recipe, runs, *options) as server,
        httpx.Client(base_url=server.address, timeout=90, trust_env=False) as client,
    ):
        yield MeasuredServer(client, runs, rule_names(rules))


@contextlib.contextmanager
def served_words(rules: int, size: ReplicaRange = FIXED) -> Iterator[MeasuredServer]:
    """Replicas of an engine without a model, on Ray, behind an ingress in this process."""
    from serve.cluster.ray_pool import ray_replicas  # Ray, which --help does not need

    with tempfile.TemporaryDirectory(prefix="guard-", ignore_cleanup_errors=True) as scratch:
        root = Path(scratch)
        names = rule_names(rules)
        folders = {name: save_words(root / "runs" / name, name.encode()) for name in names}
        snapshots = Snapshots(root / "served")
        snapshots.write({name: snapshots.keep(folder) for name, folder in folders.items()})
        with ray_replicas(size, WordsStart(), [snapshots], root / "ray") as (pool,):
            shard = Shard(pool, ShardRules(pool, snapshots, folders))
            app = create_ingress(ShardedRules([shard]), words, most_replicas=size.high)
            with served_here(app) as client:
                yield MeasuredServer(client, Runs(root / "runs"), names)


def replica_processes() -> list[int]:
    """The processes of replicas that this process or its server has started."""
    pids: list[int] = []
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ServeReplica" in " ".join(process.cmdline()):
                pids.append(process.pid)
    return sorted(pids)


def wait_for_number(client: httpx.Client, replicas: int) -> None:
    """Wait until there are so many replicas. Raises GuardError if that takes too long."""
    until = time.monotonic() + BACK_S
    while f"guard_replicas {replicas:.1f}" not in client.get("/metrics").text:
        if time.monotonic() > until:
            problem, got = f"there are not {replicas} replicas", f"{BACK_S:g} s of waiting"
            raise GuardError(problem, got=got, remedy="Look at the server's log")
        time.sleep(0.5)


def wait_for_all(client: httpx.Client, without: int | None = None) -> None:
    """Wait until all replicas are ready. Raises GuardError if that takes too long.

    `without`: a killed process, which must not be among them.
    """
    until = time.monotonic() + BACK_S
    while time.monotonic() < until:
        is_gone = without not in replica_processes()
        if is_gone and f"guard_ready {REPLICAS:.1f}" in client.get("/metrics").text:
            return
        time.sleep(0.05)
    got = f"{BACK_S:g} s of waiting"
    raise GuardError("a replica did not come back", got=got, remedy="Look at the server's log")
