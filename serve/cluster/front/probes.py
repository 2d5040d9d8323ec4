"""What orchestrators and Prometheus ask of a cluster, of all replicas together.

As `serve/api/probes.py`: a cluster is up while any replica is. Metrics are those of one server:
counts and sizes of all replicas are added up. A sum that falls reads as a restart of all. So the
last counts of a replica that is gone are kept, under its name, since it may only have been too slow
to answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from serve.api.probes import up_or_down
from serve.cluster.messages import ReplicaLost
from serve.cluster.service import ClusterService

# Metrics of requests: the ingress counts these itself, with those that no replica saw.
ONLY_OF_INGRESS = ("guard_request_seconds",)
# The metrics that are the same on all replicas, or not sums.
LARGEST = ("guard_rules_served", "guard_rule_info", "process_start_time_seconds")
CREATED = "_created"  # the time at which counting began, which is not summed
COUNTS = ("counter", "histogram")

SampleKey = tuple[str, tuple[tuple[str, str], ...]]  # a sample's name and labels


class SummedMetrics:
    """Adds up the metrics of replicas, by their names, and the last counts of those gone."""

    def __init__(self) -> None:
        self._last: dict[str, list[Metric]] = {}  # by replica

    def families(self, expositions: Mapping[str, str]) -> list[Metric]:
        """The families of the replicas of these names, added up."""
        for replica, text in expositions.items():
            self._last[replica] = _families(text)
        counted: list[Metric] = []
        for replica, families in self._last.items():
            counted += families if replica in expositions else _counts(families)
        replicas = GaugeMetricFamily("guard_replicas", "Replicas that answer.", len(expositions))
        return [*_summed(counted), replicas]


def _counts(families: Iterable[Metric]) -> list[Metric]:
    return [family for family in families if family.type in COUNTS]


class FamiliesCollector(Collector):
    """A collector of metric families that exist already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def merged(ingress_registry: CollectorRegistry, families: Iterable[Metric]) -> CollectorRegistry:
    """A registry of an ingress's own families, added to those of the replicas."""
    registry = CollectorRegistry()
    registry.register(FamiliesCollector(_summed([*families, *ingress_registry.collect()])))
    return registry


def _families(text: str) -> list[Metric]:
    families: list[Metric] = []
    for family in text_string_to_metric_families(text):
        if family.name not in ONLY_OF_INGRESS and not family.name.endswith(CREATED):
            families.append(family)
    return families


def _summed(families: Iterable[Metric]) -> list[Metric]:
    by_name: dict[str, list[Metric]] = {}
    for family in families:
        by_name.setdefault(family.name, []).append(family)
    return [_sum(same) for same in by_name.values()]


def _sum(families: Sequence[Metric]) -> Metric:
    values: dict[SampleKey, float] = {}
    for family in families:
        for sample in family.samples:
            if sample.name.endswith(CREATED):
                continue
            key = (sample.name, tuple(sorted(sample.labels.items())))
            if family.name in LARGEST:
                values[key] = max(values.get(key, sample.value), sample.value)
            else:
                values[key] = values.get(key, 0.0) + sample.value
    first = families[0]
    summed = Metric(first.name, first.documentation, first.type)
    for (name, labels), value in values.items():
        summed.add_sample(name, dict(labels), value)
    return summed


# Seconds from the first look that finds no replica, after which none is expected back.
LOST_S = 120.0


class ClusterProbes:
    """Says how the replicas are. For one event loop."""

    def __init__(self, service: ClusterService) -> None:
        self._service = service
        self._sums = SummedMetrics()
        self._lost_since: float | None = None  # by time.monotonic; None while a replica is there

    def add_to(self, app: FastAPI) -> None:
        app.add_route("/healthz", self.healthz, methods=["GET"])
        app.add_route("/readyz", self.readyz, methods=["GET"])
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
        """Whether a replica is known to run."""
        with contextlib.suppress(ReplicaLost):
            return await self._service.replicas.running() > 0
        return False

    async def readyz(self, request: Request) -> JSONResponse:
        return up_or_down(await self._service.is_ready())

    async def metrics(self, request: Request) -> Response:
        """The metrics of all replicas, added up; where none answers, what they counted last."""
        expositions = {
            answer.replica: answer.value for answer in await self._service.answers("metrics")
        }
        text, served = "Rules that can be asked.", len(self._service.cards)
        families = self._sums.families(expositions)
        families.append(GaugeMetricFamily("guard_rules_served", text, served))
        registry = merged(self._service.metrics.registry, families)
        accept = request.headers.get("accept", "")
        content, content_type = self._service.metrics.exposition(accept, registry)
        return Response(content, headers={"content-type": content_type})
