"""The extra time of a check that finds the engine asleep: the same check after a pause and without.

Caches are cold then, and a core has to wake. In an open-loop load at low rates this is every check.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from serve.bench.planning.bursts import BurstMeter, BurstPlan

PAUSE_S = 0.05
TOKENS, RULES = 300, 12


class WakePair(NamedTuple):
    """The times of the same work, after a pause and right after other work."""

    asleep_ms: float
    awake_ms: float


def wake_pairs(meter: BurstMeter, count: int) -> list[WakePair]:
    """Measure `count` pairs, one after the other."""
    plan = BurstPlan(((TOKENS, min(RULES, meter.most_rules)),))
    pairs = []
    for _ in range(count):
        asleep, awake = meter.run(plan, PAUSE_S), meter.run(plan)
        pairs.append(WakePair(asleep.submit_ms + asleep.steps_ms, awake.submit_ms + awake.steps_ms))
    return pairs


def wake_ms(pairs: Sequence[WakePair]) -> float:
    """The median difference, at least 0."""
    return max(0.0, statistics.median(pair.asleep_ms - pair.awake_ms for pair in pairs))
