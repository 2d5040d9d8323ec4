"""The cluster as an application of Ray Serve, for a Ray that others run: KubeRay's, for example.

    import_path: serve.cluster.kubernetes:build
    args: {model: tiny, runs: /srv/centurion/runs, replicas: "2-4"}

The ingress is a deployment of one replica, which Ray's proxies ask over HTTP; apart from that all
is as with `make up REPLICAS=`. `runs` is a folder that all nodes share. The copies of what is
served lie there too, in `cluster/`, so that an ingress that is started again goes on with the rules
that were served, and not with what was trained since. Imports Ray.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field, field_validator
from ray import serve
from ray.serve.handle import DeploymentHandle

from guard.errors import GuardError
from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict, validate
from guard.layout import Runs
from serve.cluster.front.ingress import create_ingress
from serve.cluster.log import log_into
from serve.cluster.ray_pool import (
    DEPLOYMENT,
    FINISHING_S,
    QUIET,
    RayPool,
    guard_deployment,
)
from serve.cluster.served import ServedOptions
from serve.cluster.shards.placement import split
from serve.cluster.shards.rules import ShardedRules
from serve.cluster.shards.shard import Shard
from serve.cluster.shards.shard_rules import UNUSED_S, ShardRules
from serve.cluster.size import ReplicaRange
from serve.cluster.snapshots import Snapshots, version_of
from serve.engine.thread.engine_thread import TIMEOUT_S
from serve.observers import open_observers
from serve.policy.rule_set import load_rule_sets
from serve.selection import Selection, find_trained, served_parts
from serve.tenants.tenant_file import load_tenants

MAX_AT_INGRESS = 10_000  # the ingress's own limits are lower, and answer in the wire format
COPIES = "cluster"  # the folder of what is served, in `runs`
# There, how the last applications began: that of now, and those that it replaces.
BEGINNINGS, KEPT_BEGINNINGS = "beginnings.txt", 5


SharedPath = Annotated[Path, Field(strict=False)]  # a text in `args`


class ApplicationArguments(Strict):
    """The options of `make up`, as `args` of the application; paths as the replicas see them."""

    model: str = "tiny"
    rules: str | None = None
    method: str | None = None
    runs: SharedPath
    replicas: str = "2"  # of each shard
    scale_down: float | None = Field(default=None, gt=0)
    shards: int = Field(default=1, ge=1)
    timeout: float = Field(default=TIMEOUT_S, gt=0)
    rule_sets: SharedPath | None = None
    tenants: SharedPath | None = None
    audit_log: SharedPath | None = None
    traces: str | None = None
    watch: bool = False
    cpus: float = Field(default=1, gt=0)  # of a replica
    gpus: float = Field(default=0, ge=0)

    @field_validator("replicas")
    @classmethod
    def _is_a_range(cls, replicas: str) -> str:
        try:
            ReplicaRange.parse(replicas)
        except argparse.ArgumentTypeError as error:
            raise ValueError("must be a number such as 2 or 1-4, at most 256") from error
        return replicas

    @property
    def size(self) -> ReplicaRange:
        """How many replicas each shard has.

        Raises GuardError for a `scale_down` without a range of replicas.
        """
        size = ReplicaRange.parse(self.replicas)
        if self.scale_down is None:
            return size
        if size.is_fixed:
            remedy = "Give replicas a range such as 1-4, or leave scale_down out"
            raise GuardError(
                "scale_down needs a range of replicas",
                where="args of the application",
                got=f"replicas: {self.replicas}",
                remedy=remedy,
            )
        return size.scaled_down_after(self.scale_down)


@dataclass(frozen=True)
class IngressOptions:
    """What an ingress needs beside the replicas."""

    selection: Selection
    served: ServedOptions
    snapshots: Sequence[Snapshots]  # of each shard
    folders: Sequence[Mapping[str, Path]]
    is_watching: bool
    most_replicas: int


class ServedIngress:
    """The ingress as a deployment; Ray asks it for its app."""

    def __init__(self, shards: Sequence[DeploymentHandle], options: IngressOptions) -> None:
        self._shards = shards
        self._options = options

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The app in front of the replicas, by the rules that were served last."""
        options, served = self._options, self._options.served
        log_into(served.log)  # as the replicas do: without what a request says
        _note_beginning(options.snapshots[0])
        find = find_trained(options.selection, served.parts)
        shards: list[Shard] = []
        for handle, snapshots, folders in zip(
            self._shards, options.snapshots, options.folders, strict=True
        ):
            pool = RayPool(handle)
            rules = ShardRules(pool, snapshots, folders, find, served.timeout_s)
            shards.append(Shard(pool, rules))
        return create_ingress(
            ShardedRules(shards, served.folders, find),
            served.token_counter(),
            served.timeout_s,
            rule_sets=served.rule_sets,
            tenants=served.tenants,
            observers=open_observers(served.audit_log, served.traces),
            is_watching=options.is_watching,
            most_replicas=options.most_replicas,
        )


def build(args: dict[str, Any]) -> serve.Application:
    """The application with these ApplicationArguments.

    Raises GuardError for whatever `make up` would refuse.
    """
    arguments = validate(args, ApplicationArguments, where="args of the application")
    size = arguments.size
    size.check_processes(arguments.shards)
    runs = Runs(arguments.runs)
    selection = Selection(arguments.model, arguments.rules, arguments.method, runs=runs)
    options = _ingress_options(arguments, selection, size)
    resources = {"num_cpus": arguments.cpus, "num_gpus": arguments.gpus}
    served = options.served if arguments.shards == 1 else options.served.for_shard()
    shards: list[serve.Application] = []
    for number, snapshots in enumerate(options.snapshots):
        name = f"{DEPLOYMENT}-{number}"
        deployment = guard_deployment(size, resources, name, arguments.timeout)
        shards.append(deployment.bind(served, snapshots))
    ingress = serve.deployment(
        serve.ingress()(ServedIngress),
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=MAX_AT_INGRESS,
        graceful_shutdown_timeout_s=arguments.timeout + FINISHING_S,
        ray_actor_options={"num_cpus": 1},
        logging_config=QUIET,
    )
    return ingress.bind(shards, options)


def _ingress_options(
    arguments: ApplicationArguments, selection: Selection, size: ReplicaRange
) -> IngressOptions:
    served = ServedOptions(
        served_parts(selection),
        arguments.timeout,
        audit_log=arguments.audit_log,
        traces=arguments.traces,
    )
    folders = split(served.folders, arguments.shards)
    snapshots = _served_last(arguments.runs / COPIES, folders)
    # A set may name a rule that was added since. Also one that was removed: it is unjudged, as it
    # was before, and no reason not to start again.
    names = dict.fromkeys(served.folders)
    for noted in snapshots:
        names |= dict.fromkeys(noted.read())
    rule_sets = load_rule_sets(arguments.rule_sets, names) if arguments.rule_sets else {}
    tenants = load_tenants(arguments.tenants, rule_sets) if arguments.tenants else None
    served = replace(served, rule_sets=rule_sets, tenants=tenants)
    return IngressOptions(
        selection,
        served,
        snapshots,
        folders,
        arguments.watch,
        size.high,
    )


def _served_last(root: Path, shards: Sequence[Mapping[str, Path]]) -> list[Snapshots]:
    """What the shards serve at first; what was served last, where the application before this one
    began with the same weights on as many shards.

    All notes belong to the same beginning, so a rule that was added to one shard is on no other.
    """
    copies = Snapshots(root)
    first_copies: list[dict[str, Path]] = []
    for folders in shards:
        first_copies.append({rule: copies.keep(folder) for rule, folder in folders.items()})
    beginning = "-".join(version_of(shard_copies) for shard_copies in first_copies)
    digest = hashlib.sha256(beginning.encode()).hexdigest()[:16]
    beginnings = _beginnings(root)
    goes_on = not beginnings or beginnings[0] == digest
    served: list[Snapshots] = []
    for number, shard_copies in enumerate(first_copies):
        snapshots = Snapshots(root, f"served-{number}-{digest}.json")
        if not (goes_on and snapshots.is_noted):
            snapshots.write(shard_copies)
        served.append(snapshots)
    return served


def _beginnings(root: Path) -> list[str]:
    """How the last applications began that ran, the last one first."""
    file = root / BEGINNINGS
    return file.read_text(encoding="utf-8").split() if file.is_file() else []


def _note_beginning(snapshots: Snapshots) -> None:
    """Note that the application whose shard has these runs.

    Notes of what is served, of others than the last KEPT_BEGINNINGS, are deleted once they are
    UNUSED_S old, so that their copies can be: an application that is still starting has a new one.
    """
    root, digest = snapshots.note.parent, _beginning_of(snapshots.note)
    earlier = [beginning for beginning in _beginnings(root) if beginning != digest]
    kept = [digest, *earlier][:KEPT_BEGINNINGS]
    with atomic_write(root / BEGINNINGS) as part:
        part.write_text("\n".join(kept) + "\n", encoding="utf-8")
    for note in root.glob("served-*.json"):
        is_old = time.time() - note.stat().st_mtime > UNUSED_S
        if is_old and _beginning_of(note) not in kept:
            note.unlink(missing_ok=True)


def _beginning_of(note: Path) -> str:
    return note.stem.rpartition("-")[2]
