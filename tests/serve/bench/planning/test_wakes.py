from __future__ import annotations

from serve.bench.planning.wakes import WakePair, wake_ms


def test_what_a_pause_costs_is_the_median_difference_and_never_below_nothing() -> None:
    pairs = [WakePair(30.0, 25.0), WakePair(90.0, 25.0), WakePair(28.0, 27.0)]
    assert wake_ms(pairs) == 5.0
    assert wake_ms([WakePair(20.0, 25.0)]) == 0.0
