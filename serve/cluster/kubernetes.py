"""The cluster as an application of Ray Serve, on a Ray that others run, such as KubeRay's.

    import_path: serve.cluster.kubernetes:build
    args: {model: tiny, runs: /srv/centurion/runs, replicas: "2-4"}

The ingress is a Ray deployment of one replica. Ray's proxies pass HTTP requests to it. All else is
as with `make up REPLICAS=`. All nodes share the folder `runs`. The served copies of weights lie in
its folder `cluster/`. An ingress that starts again serves the same copies, even if rules were
trained meanwhile. Imports Ray.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field, field_validator
from ray import serve
from ray.serve.handle import DeploymentHandle

from guard.errors import GuardError
from guard.files.yaml_file import Strict, validate
from guard.layout import Runs
from serve.cluster.log import log_into
from serve.cluster.ray_pool import FINISHING_S, QUIET, RayPool, guard_deployment
from serve.cluster.served import ServedOptions
from serve.cluster.service import UNUSED_S
from serve.cluster.size import ReplicaRange
from serve.cluster.snapshots import Snapshots, version_of
from serve.cluster.start import app_in_front
from serve.engine.thread.engine_thread import TIMEOUT_S
from serve.observers import open_observers
from serve.policy.rule_set import load_rule_sets
from serve.registry.rollout import Rollout
from serve.selection import RegisteredRollouts, Selection, served_parts
from serve.tenants.tenant_file import load_tenants

MAX_AT_INGRESS = 10_000  # the ingress's own limits are lower, and answer in the wire format
KEPT_NOTES = 5
COPIES = "cluster"  # the folder of the copies, in `runs`
SharedPath = Annotated[Path, Field(strict=False)]  # a text in `args`


class ApplicationArguments(Strict):
    """The options of `make up` as `args` of the application. Replicas must see the same paths."""

    model: str = "tiny"
    rules: str | None = None
    method: str | None = None
    runs: SharedPath
    replicas: str = "2"
    scale_down: float | None = Field(default=None, gt=0)
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
        """How many replicas there are. Raises GuardError for `scale_down` without a range."""
        size = ReplicaRange.parse(self.replicas)
        if self.scale_down is None:
            return size
        if size.is_fixed:
            remedy = "Give replicas a range such as 1-4, or leave scale_down out"
            problem, where = "scale_down needs a range of replicas", "args of the application"
            raise GuardError(problem, where=where, got=f"replicas: {self.replicas}", remedy=remedy)
        return size.scaled_down_after(self.scale_down)


@dataclass(frozen=True)
class IngressOptions:
    """What an ingress needs beside the replicas."""

    served: ServedOptions
    snapshots: Snapshots
    is_watching: bool
    most_replicas: int


class ServedIngress:
    """The ingress as a Ray deployment. Ray asks it for its app."""

    def __init__(self, replicas: DeploymentHandle, options: IngressOptions) -> None:
        self._replicas = replicas
        self._options = options

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The app in front of the replicas. It serves the rules of the snapshots."""
        options, served = self._options, self._options.served
        log_into(served.log)  # as replicas log: without the text of requests
        return app_in_front(
            RayPool(self._replicas),
            options.snapshots,
            served,
            observers=open_observers(served.audit_log, served.traces),
            is_watching=options.is_watching,
            most_replicas=options.most_replicas,
        )


def build(args: dict[str, Any]) -> serve.Application:
    """The application of these arguments. Raises GuardError for what `make up` would refuse."""
    arguments = validate(args, ApplicationArguments, where="args of the application")
    options = _ingress_options(arguments)
    resources = {"num_cpus": arguments.cpus, "num_gpus": arguments.gpus}
    deployment = guard_deployment(arguments.size, resources, arguments.timeout)
    replicas = deployment.bind(options.served, options.snapshots)
    ingress = serve.deployment(
        serve.ingress()(ServedIngress),
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=MAX_AT_INGRESS,
        graceful_shutdown_timeout_s=arguments.timeout + FINISHING_S,
        ray_actor_options={"num_cpus": 1},
        logging_config=QUIET,
    )
    return ingress.bind(replicas, options)


def _ingress_options(arguments: ApplicationArguments) -> IngressOptions:
    most_replicas, runs = arguments.size.high, Runs(arguments.runs)
    selection = Selection(arguments.model, arguments.rules, arguments.method, runs=runs)
    parts = served_parts(selection)
    served = ServedOptions(
        parts,
        arguments.timeout,
        audit_log=arguments.audit_log,
        traces=arguments.traces,
        source=RegisteredRollouts(selection, parts),
    )
    snapshots = _served_last(arguments.runs / COPIES, served.folders)
    # A rule set may name a rule that an administrator added or removed after the start. A removed
    # rule is unjudged. It must not keep the ingress from starting again.
    names = dict.fromkeys(served.folders) | dict.fromkeys(snapshots.read())
    rule_sets = load_rule_sets(arguments.rule_sets, names) if arguments.rule_sets else {}
    tenants = load_tenants(arguments.tenants, rule_sets) if arguments.tenants else None
    served = replace(served, rule_sets=rule_sets, tenants=tenants)
    return IngressOptions(served, snapshots, arguments.watch, most_replicas)


def _served_last(root: Path, folders: Mapping[str, Path]) -> Snapshots:
    """The copies that are served: those that an application which began like this one served last.

    The last KEPT_NOTES stay, and those younger than UNUSED_S: their applications may still run, or
    come back. An older note frees its copies.
    """
    copies = Snapshots(root)
    first = {rule: Rollout(folder=copies.keep(folder)) for rule, folder in folders.items()}
    snapshots = Snapshots(root, f"served-{version_of(first)[:16]}.json")
    if not snapshots.note.is_file():
        snapshots.write(first)
    snapshots.note.touch()
    notes = sorted(root.glob("served-*.json"), key=lambda note: note.stat().st_mtime)
    for note in notes[:-KEPT_NOTES]:
        if time.time() - note.stat().st_mtime > UNUSED_S:
            note.unlink(missing_ok=True)
    return snapshots
