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
from serve.cluster.front.ingress import create_ingress
from serve.cluster.log import relayed
from serve.cluster.messages import Replicas
from serve.cluster.served import ServedOptions
from serve.cluster.service import ClusterService
from serve.cluster.size import ReplicaRange
from serve.cluster.snapshots import Snapshots


@contextlib.contextmanager
def running_cluster(
    size: ReplicaRange,
    options: ServedOptions,
    *,
    observers: Sequence[Observer] = (),
    is_watching: bool = False,
) -> Iterator[FastAPI]:
    """A cluster of replicas with these options, for as long as the context lasts: the app that
    listens for it.

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
    with contextlib.ExitStack() as until_ended:
        temporary = tempfile.TemporaryDirectory(prefix="guard-", ignore_cleanup_errors=True)
        scratch = Path(until_ended.enter_context(temporary))
        snapshots = Snapshots(scratch / "served")
        snapshots.keep_all(options.folders)
        pipe = scratch / "log"
        until_ended.enter_context(relayed(pipe))
        replica_options = replace(options, log=pipe)
        until_ended.enter_context(ray_pool.serve_on_ray(size.high, scratch))
        deployed = ray_pool.deployed_replicas(size, replica_options, snapshots, options.timeout_s)
        yield app_in_front(
            until_ended.enter_context(deployed),
            snapshots,
            options,
            observers=observers,
            is_watching=is_watching,
            most_replicas=size.high,
        )


def app_in_front(
    replicas: Replicas,
    snapshots: Snapshots,
    options: ServedOptions,
    *,
    observers: Sequence[Observer],
    is_watching: bool,
    most_replicas: int,
) -> FastAPI:
    """The app that listens for these replicas, of what the snapshots say is served."""
    tokens, timeout_s = options.token_counter(), options.timeout_s
    folders, source = options.folders, options.source
    return create_ingress(
        ClusterService(replicas, snapshots, folders, tokens, source, observers, timeout_s),
        options.timeout_s,
        rule_sets=options.rule_sets,
        tenants=options.tenants,
        is_watching=is_watching,
        most_replicas=most_replicas,
    )
