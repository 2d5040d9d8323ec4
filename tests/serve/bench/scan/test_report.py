"""The table of a scan's report has the parts that were measured."""

from __future__ import annotations

from serve.bench.report import Spread
from serve.bench.scan.report import ClusterRow, KilledRow, ScanReport, ThroughputRow, table

KILLED = KilledRow(
    conversations=100,
    rows_a_part=10,
    kills=10,
    kills_before_judging=2,
    whole_s=30.0,
    rows=1500,
    identical_files=9,
    files=10,
    missing_rows=0,
    extra_rows=2,
    repeated_rows=0,
    different_rows=3,
    largest_change=0.001,
)
THROUGHPUT = ThroughputRow(
    conversations=100,
    rows_a_part=50,
    threads=2,
    engine_per_s=Spread.of([40.0]),
    scan_per_s=Spread.of([39.0]),
    ratio=Spread.of([0.975]),
    reading_s=0.1,
)
CLUSTER = tuple(
    ClusterRow(
        actors=actors,
        conversations=100,
        rows_a_part=10,
        threads=1,
        per_s=20.0 + actors,
        idle_ms=0.5,
        start_s=12.0,
    )
    for actors in range(3)
)


def report(**sections: object) -> ScanReport:
    facts = {"commit": "1a2b3c4", "hardware": "a machine", "versions": {}, "model": "tiny"}
    return ScanReport.model_validate({**facts, "peak_memory_mib": 1.0, "rules": 15, **sections})


def test_the_table_says_what_was_measured() -> None:
    text = table(report(killed=KILLED, throughput=THROUGHPUT, cluster=CLUSTER))
    assert "ratio 0.975 (0.975 to 0.975)" in text
    assert "10 times killed (2 before a new part was written)" in text
    assert "9 of 10 files byte for byte" in text and "3 different" in text
    assert "0 missing, 0 repeated, 2 beside them" in text
    assert [line.split()[0] for line in text.splitlines() if " ms " in line] == ["0", "1", "2"]
    assert "killed" not in table(report(throughput=THROUGHPUT))
