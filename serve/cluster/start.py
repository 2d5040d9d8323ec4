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
from serve.cluster.note import Served, ServedNote, version_card
from serve.cluster.served import ServedOptions
from serve.cluster.service import ClusterService
from serve.registry.rollout import Rollout


@contextlib.contextmanager
def running_cluster(
    replicas: int,
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
        remedy = "`make up REPLICAS=2` installs it, from setup/cluster.txt"
        raise GuardError(f"replicas need Ray: {error}", remedy=remedy) from error
    with contextlib.ExitStack() as until_ended:
        temporary = tempfile.TemporaryDirectory(prefix="guard-", ignore_cleanup_errors=True)
        scratch = Path(until_ended.enter_context(temporary))
        note = ServedNote(scratch / "served.json")
        note.write(_first_served(options))
        pipe = scratch / "log"
        until_ended.enter_context(relayed(pipe))
        until_ended.enter_context(ray_pool.serve_on_ray(replicas, scratch))
        deployed = ray_pool.deployed_replicas(
            replicas, replace(options, log=pipe), note, options.timeout_s
        )
        service = ClusterService(
            until_ended.enter_context(deployed),
            note,
            options.token_counter(),
            options.source,
            observers,
            options.timeout_s,
            options.review_store,
        )
        yield create_ingress(
            service,
            options.timeout_s,
            rule_sets=options.rule_sets,
            tenants=options.tenants,
            is_watching=is_watching,
            replicas=replicas,
            policies=options.policies,
        )


def _first_served(options: ServedOptions) -> Served:
    """What is served at first. Raises GuardError for weights that are no version."""
    served: Served = {}
    for rule, folder in options.folders.items():
        version_card(rule, folder)
        served[rule] = Rollout(folder=folder)
    return served
