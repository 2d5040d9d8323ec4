"""The metrics of all replicas as those of one server: counts and sizes are added up.

A replica that is gone takes its counts along, and a sum that falls reads as a restart of all: what
it counted last is kept. Knows nothing of what is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

# Said of requests: the ingress counts these, and those that no replica saw.
ONLY_OF_INGRESS = ("guard_request_seconds",)
# What is the same of all replicas, or no sum.
LARGEST = ("guard_rules_served", "guard_rule_info", "process_start_time_seconds")
CREATED = "_created"  # when counting began, which is no sum
COUNTS = ("counter", "histogram")

SampleKey = tuple[str, tuple[tuple[str, str], ...]]  # a sample's name and labels
Counted = dict[SampleKey, float]


class SummedMetrics:
    """Adds up what replicas say, by their names, and what those said last that are gone."""

    def __init__(self) -> None:
        self._last: dict[str, Counted] = {}
        self._gone: Counted = {}

    def families(self, expositions: Mapping[str, str]) -> list[Metric]:
        """The families of the replicas of these names, added up."""
        families: dict[str, Metric] = {}
        sums: dict[str, Counted] = {}
        for name in [name for name in self._last if name not in expositions]:
            for key, value in self._last.pop(name).items():
                self._gone[key] = self._gone.get(key, 0.0) + value
        for replica, text in expositions.items():
            counted: Counted = {}
            for family in text_string_to_metric_families(text):
                if family.name in ONLY_OF_INGRESS or family.name.endswith(CREATED):
                    continue
                families.setdefault(family.name, family)
                _add(sums.setdefault(family.name, {}), family, counted)
            self._last[replica] = counted
        return [self._summed(families[name], sums[name]) for name in families] + [
            _gauge("guard_replicas", "Replicas that answer.", len(expositions))
        ]

    def _summed(self, family: Metric, sums: Counted) -> Metric:
        summed = _empty(family)
        for key, value in sums.items():
            name, labels = key
            summed.add_sample(name, dict(labels), value + self._gone.get(key, 0.0))
        return summed


class FamiliesCollector(Collector):
    """Gives families that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        yield from self._families


def merged(ingress_registry: CollectorRegistry, families: Iterable[Metric]) -> CollectorRegistry:
    """A registry of an ingress's own families, added to those of the replicas."""
    by_name = {family.name: family for family in families}
    for family in ingress_registry.collect():
        into = by_name.setdefault(family.name, _empty(family))
        _add_into(into, family)
    registry = CollectorRegistry()
    registry.register(FamiliesCollector(by_name.values()))
    return registry


def _add(sums: Counted, family: Metric, counted: Counted) -> None:
    for sample in family.samples:
        if sample.name.endswith(CREATED):
            continue
        key = (sample.name, tuple(sorted(sample.labels.items())))
        if family.name in LARGEST:
            sums[key] = max(sums.get(key, sample.value), sample.value)
        else:
            sums[key] = sums.get(key, 0.0) + sample.value
        if family.type in COUNTS:
            counted[key] = sample.value


def _empty(family: Metric) -> Metric:
    return Metric(family.name, family.documentation, family.type)


def _add_into(family: Metric, added: Metric) -> None:
    sums: Counted = {}
    for source in (family, added):
        _add(sums, source, {})
    family.samples = []
    for (name, labels), value in sums.items():
        family.add_sample(name, dict(labels), value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value)
