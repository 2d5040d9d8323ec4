from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serve.cluster.front.probes import MAX_GONE, SummedMetrics, merged


def exposition(checks: int, ready: int, *seconds: float, verdict: str = "allow") -> str:
    """What a replica says that has answered so many checks."""
    registry = CollectorRegistry()
    counter = Counter("guard_checks", "Checks.", ["verdict"], registry=registry)
    counter.labels(verdict).inc(checks)
    Gauge("guard_ready", "Ready.", registry=registry).set(ready)
    Gauge("guard_rules_served", "Rules.", registry=registry).set(3)
    histogram = Histogram("guard_check_seconds", "Seconds.", buckets=(1, 2), registry=registry)
    for value in seconds:
        histogram.observe(value)
    Counter("guard_request_seconds", "The replica's own.", registry=registry).inc()
    return generate_latest(registry).decode()


def samples(sums: SummedMetrics, **expositions: str) -> dict[str, float]:
    """All sums as a scrape gives them, by name and labels."""
    own = CollectorRegistry()
    Counter("guard_request_seconds", "The ingress's.", registry=own).inc(7)
    Counter("guard_checks", "Checks.", ["verdict"], registry=own).labels("allow").inc(100)
    text = generate_latest(merged(own, sums.families(expositions))).decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            found[f"{sample.name} {labels}".strip()] = sample.value
    return found


def test_counts_are_added_up_and_what_all_have_is_said_once() -> None:
    found = samples(SummedMetrics(), a=exposition(2, 1, 0.5), b=exposition(3, 1, 0.5, 1.5, 9.0))
    assert found["guard_checks_total allow"] == 105
    assert found["guard_ready"] == 2
    assert found["guard_rules_served"] == 3
    assert found["guard_check_seconds_bucket 1.0"] == 2
    assert found["guard_check_seconds_bucket +Inf"] == found["guard_check_seconds_count"] == 4
    assert found["guard_check_seconds_sum"] == 11.5
    assert found["guard_request_seconds_total"] == 7
    assert found["guard_replicas"] == 2
    assert not [name for name in found if "_created" in name]


def test_what_a_replica_counted_stays_when_it_is_gone_and_its_sizes_go() -> None:
    sums = SummedMetrics()
    b = exposition(3, 1, 0.5)
    samples(sums, a=exposition(2, 1), b=b, d=exposition(6, 1, verdict="other"))
    for _ in range(2):
        found = samples(sums, a=exposition(4, 1))
        assert found["guard_checks_total allow"] == 107
        assert found["guard_checks_total other"] == 6  # which it alone had counted
        assert found["guard_ready"] == found["guard_replicas"] == 1
        assert found["guard_check_seconds_count"] == 1
    found = samples(sums, a=exposition(4, 1), b=b, c=exposition(1, 0))
    assert found["guard_checks_total allow"] == 108, "one that missed a scrape is counted once"
    assert found["guard_ready"] == 2


def test_of_many_that_are_gone_the_last_may_come_back() -> None:
    sums, one = SummedMetrics(), exposition(1, 1)
    samples(sums, first=one)
    for number in range(2 * MAX_GONE):
        samples(sums, **{"first": one, f"replica {number}": one})
    for replica in ("last", "first", "last"):
        found = samples(sums, **{replica: one})
        assert found["guard_checks_total allow"] == 102 + 2 * MAX_GONE
