"""The metrics of all replicas as those of one server: counts and sizes are added up.

A sum that falls reads as a restart of all. So the last counts of a replica that is gone are kept,
under its name, since it may only have been too slow to answer. Knows nothing of what is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

# Metrics of requests: the ingress counts these itself, with those that no replica saw.
ONLY_OF_INGRESS = ("guard_request_seconds",)
# The metrics that are the same on all replicas, or not sums.
LARGEST = ("guard_rules_served", "guard_rule_info", "process_start_time_seconds")
CREATED = "_created"  # the time at which counting began, which is not summed
COUNTS = ("counter", "histogram")
MAX_GONE = 64  # replicas that may come back; those that were gone before them are added up

SampleKey = tuple[str, tuple[tuple[str, str], ...]]  # a sample's name and labels


class SummedMetrics:
    """Adds up the metrics of replicas, by their names, and the last counts of those gone."""

    def __init__(self) -> None:
        self._last: dict[str, list[Metric]] = {}  # by replica
        self._long_gone: list[Metric] = []

    def families(self, expositions: Mapping[str, str]) -> list[Metric]:
        """The families of the replicas of these names, added up."""
        for replica, text in expositions.items():
            self._last.pop(replica, None)  # so that those that answered last are the last
            self._last[replica] = _families(text)
        gone = [replica for replica in self._last if replica not in expositions]
        for replica in gone[:-MAX_GONE]:
            self._long_gone = _summed([*self._long_gone, *_counts(self._last.pop(replica))])
        counted = list(self._long_gone)
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
