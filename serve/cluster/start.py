"""A cluster on this machine: replicas, the rules they share, and the app that listens for them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI

from guard.errors import GuardError
from serve.api.observe.record import Observer
from serve.api.service import FindTrained
from serve.cluster.front.ingress import create_ingress
from serve.cluster.log import relayed
from serve.cluster.messages import Replicas
from serve.cluster.served import ServedOptions
from serve.cluster.shards.placement import split
from serve.cluster.shards.service import ClusterService
from serve.cluster.shards.shard import Shard
from serve.cluster.size import ReplicaRange
from serve.cluster.snapshots import Snapshots


@contextlib.contextmanager
def running_cluster(
    size: ReplicaRange,
    options: ServedOptions,
    *,
    shards: int = 1,
    observers: Sequence[Observer] = (),
    is_watching: bool = False,
    find_trained: FindTrained = lambda rule, served: None,
) -> Iterator[FastAPI]:
    """A cluster of `shards` groups of replicas with these options, for as long as the context
    lasts: the app that listens for it.

    The app closes its `observers`. Raises GuardError if Ray is not installed, or a replica does not
    start.
    """
    try:
        from serve.cluster import ray_pool  # which nothing else needs
    except ImportError as error:
        raise GuardError(
            f"replicas need Ray: {error}",
            remedy="`make up REPLICAS=2` installs it, from setup/cluster.txt",
        ) from error
    size.check_processes(shards)
    shard_folders = split(options.folders, shards)
    with contextlib.ExitStack() as until_ended:
        temporary = tempfile.TemporaryDirectory(prefix="guard-", ignore_cleanup_errors=True)
        scratch = Path(until_ended.enter_context(temporary))
        shard_snapshots: list[Snapshots] = []
        for number, folders in enumerate(shard_folders):
            snapshots = Snapshots(scratch / "served", f"shard-{number}.json")
            snapshots.keep_all(folders)
            shard_snapshots.append(snapshots)
        pipe = scratch / "log"
        until_ended.enter_context(relayed(pipe))
        replica_options = replace(options.for_replicas(shards), log=pipe)
        until_ended.enter_context(ray_pool.serve_on_ray(size.high * shards, scratch))
        deployed = ray_pool.deployed_replicas(
            size, replica_options, shard_snapshots, options.timeout_s
        )
        pools = until_ended.enter_context(deployed)
        yield app_in_front(
            pools,
            shard_snapshots,
            options,
            observers=observers,
            is_watching=is_watching,
            find_trained=find_trained,
            most_replicas=size.high,
        )


def app_in_front(
    pools: Sequence[Replicas],
    shard_snapshots: Sequence[Snapshots],
    options: ServedOptions,
    *,
    observers: Sequence[Observer],
    is_watching: bool,
    find_trained: FindTrained,
    most_replicas: int,
) -> FastAPI:
    """The app that listens for these shards, each with its replicas and what these serve."""
    shards: list[Shard] = []
    shard_folders = split(options.folders, len(pools))
    for pool, snapshots, folders in zip(pools, shard_snapshots, shard_folders, strict=True):
        shards.append(Shard(pool, snapshots, folders, find_trained, options.timeout_s))
    tokens = options.token_counter()
    return create_ingress(
        ClusterService(shards, tokens, options.folders, find_trained, observers),
        options.timeout_s,
        rule_sets=options.rule_sets,
        tenants=options.tenants,
        is_watching=is_watching,
        most_replicas=most_replicas,
    )
