"""A cluster on this machine: replicas, the rules they share, and the app that listens for them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI

from guard.errors import GuardError
from serve.api.service import FindTrained
from serve.cluster.ingress import create_ingress
from serve.cluster.log import relayed
from serve.cluster.pool import Replicas
from serve.cluster.rules import ClusterRules
from serve.cluster.served import ServedOptions
from serve.cluster.size import ReplicaRange
from serve.cluster.snapshots import Snapshots


@contextlib.contextmanager
def started_cluster(
    size: ReplicaRange,
    options: ServedOptions,
    *,
    is_watching: bool = False,
    find_trained: FindTrained = lambda rule: None,
) -> Iterator[FastAPI]:
    """The app that listens for replicas with these options; they end with the context.

    Raises GuardError if Ray is not installed, or a replica does not start.
    """
    folders: dict[str, Path] = {}
    for part in options.parts:
        folders |= part.folders
    with contextlib.ExitStack() as until_ended:
        temporary = tempfile.TemporaryDirectory(prefix="guard-", ignore_cleanup_errors=True)
        scratch = Path(until_ended.enter_context(temporary))
        snapshots = Snapshots(scratch / "served")
        snapshots.write({rule: snapshots.keep(folder) for rule, folder in folders.items()})
        pipe = scratch / "log"
        until_ended.enter_context(relayed(pipe))
        options = replace(options, log=pipe)
        pool = until_ended.enter_context(_replicas(size, options, snapshots, scratch))
        rules = ClusterRules(pool, snapshots, folders, find_trained)
        yield create_ingress(
            pool,
            rules,
            options.timeout_s,
            rule_sets=options.rule_sets,
            tenants=options.tenants,
            is_watching=is_watching,
            most_replicas=size.high,
        )


def _replicas(
    size: ReplicaRange, options: ServedOptions, snapshots: Snapshots, scratch: Path
) -> AbstractContextManager[Replicas]:
    """Replicas on Ray, which nothing else needs. Raises GuardError without Ray."""
    try:
        from serve.cluster.ray_pool import ray_replicas
    except ImportError as error:
        raise GuardError(
            f"replicas need Ray: {error}",
            remedy="`make up REPLICAS=2` installs it, from setup/cluster.txt",
        ) from error
    return ray_replicas(size, options, snapshots, scratch)
