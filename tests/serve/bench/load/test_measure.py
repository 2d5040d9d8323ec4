"""What a run of traffic says of an engine."""

from __future__ import annotations

from serve.bench.load.measure import LoadRun
from serve.bench.workload.traffic import Timed


def test_growth_compares_the_waits_at_the_end_with_those_at_the_beginning() -> None:
    def growth(latencies_s: list[float]) -> float:
        return LoadRun(1.0, Timed(1.0, tuple(latencies_s)), 1, 1, 1, 0).growth

    assert growth([1.0, 2.0, 1.5, 9.0, 1.0, 2.0, 1.5, 1.0, 2.0]) == 1.0
    assert growth([float(number) for number in range(1, 10)]) == 4.0
    assert growth([0.5]) == 1.0
