"""What orchestrators and Prometheus ask of a cluster, of all shards and replicas together.

As `serve/api/probes.py`: a cluster is up while any part of it is. The rules of other parts are
unjudged.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client.core import GaugeMetricFamily, Metric

from serve.api.probes import up_or_down
from serve.cluster.front.sums import SummedMetrics, merged
from serve.cluster.pool import ReplicaAnswer, ReplicaLost
from serve.cluster.shards.service import ClusterService

PROBE_S = 5.0  # seconds that replicas have to answer a probe
# Seconds from the first look that finds no replica, after which none is expected back.
LOST_S = 120.0


class ClusterProbes:
    """Says how the shards are. For one event loop."""

    def __init__(self, service: ClusterService) -> None:
        self._service = service
        self._sums = SummedMetrics()
        self._lost_since: float | None = None  # by time.monotonic; None while a replica is there

    def add_to(self, app: FastAPI) -> None:
        app.add_route("/healthz", self.healthz, methods=["GET"])
        app.add_route("/readyz", self.readyz, methods=["GET"])
        app.add_route("/health", self.readyz, methods=["GET"])
        app.add_route("/metrics", self.metrics, methods=["GET"])

    async def healthz(self, request: Request) -> JSONResponse:
        """200 while checks are answered, or will be once replicas are started again."""
        if await self._is_any_running():
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = time.monotonic()
        since = self._lost_since
        return up_or_down(since is None or time.monotonic() < since + LOST_S)

    async def _is_any_running(self) -> bool:
        """Whether a shard is known to have a replica."""
        looks = [shard.replicas.running() for shard in self._service.shards]
        is_any_running = False
        for outcome in await asyncio.gather(*looks, return_exceptions=True):
            if isinstance(outcome, int):
                is_any_running |= outcome > 0
            elif not isinstance(outcome, ReplicaLost):
                raise outcome
        return is_any_running

    async def readyz(self, request: Request) -> JSONResponse:
        try:
            shards = await self._each("ready")
        except ReplicaLost:
            return up_or_down(False)
        return up_or_down(any(state.value for state in itertools.chain(*shards)))

    async def metrics(self, request: Request) -> Response:
        """The metrics of all replicas, added up; where none answers, what they counted last."""
        try:
            shards = await self._each("metrics")
        except ReplicaLost:
            shards = [[] for _ in self._service.shards]
        expositions = {answer.replica: answer.value for answer in itertools.chain(*shards)}
        families = [*self._sums.families(expositions), *self._shard_metrics(shards)]
        registry = merged(self._service.metrics.registry, families)
        accept = request.headers.get("accept", "")
        content, content_type = self._service.metrics.exposition(accept, registry)
        return Response(content, headers={"content-type": content_type})

    async def _each(self, method: str) -> list[list[ReplicaAnswer]]:
        """For each shard, the answers that come in time; none of a shard that cannot be asked.

        Raises ReplicaLost if none can.
        """
        asking = []
        for shard in self._service.shards:
            asking.append(shard.replicas.each(method, within_s=PROBE_S, may_miss=True))
        answers: list[list[ReplicaAnswer]] = []
        failures: list[ReplicaLost] = []
        for outcome in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(outcome, ReplicaLost):
                failures.append(outcome)
                answers.append([])
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                answers.append(outcome)
        if len(failures) == len(answers):
            raise failures[0]
        return answers

    def _shard_metrics(self, shards: Sequence[Sequence[ReplicaAnswer]]) -> list[Metric]:
        """The metrics that are not sums over replicas."""
        text = "Replicas that answer, of each shard."
        replicas = GaugeMetricFamily("guard_shard_replicas", text, labels=["shard"])
        for number, answers in enumerate(shards):
            replicas.add_metric([str(number)], len(answers))
        served = len(self._service.cards)
        text = "Rules that can be asked."
        return [GaugeMetricFamily("guard_rules_served", text, served), replicas]
