"""What one replica can do, and how many a deployment needs. By simulation; knows no prices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from serve.plan.deployment import PlannedMethod
from serve.plan.replay.replica import Replay, ReplicaSimulation
from serve.plan.traffic import CheckArrival, DrawnTraffic, TrafficShape, draw_traffic

BACKLOGS = 4  # so many find the rate of saturation to within a tenth, and rather too low
BISECTIONS = 7  # so many find the greatest rate to within a hundredth
LOWEST_SHARE = 0.02  # of the rate of saturation: then a replica is nearly idle
CURVE_SHARES = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)


@dataclass(frozen=True)
class TrafficSource:
    """The traffic of a replica at any rate: drawn, or a trace that is stretched to the rate.

    A trace keeps its pattern: all its pauses become longer or shorter by the same factor.
    """

    shape: TrafficShape
    checks: int
    seed: int
    trace: tuple[CheckArrival, ...] = ()

    def at(self, rate: float) -> DrawnTraffic:
        """Traffic of `rate` checks a second."""
        if not self.trace:
            return draw_traffic(self.shape, rate, self.checks, self.seed)
        stretch = trace_rate(self.trace) / rate
        stretched = [arrival._replace(due_s=arrival.due_s * stretch) for arrival in self.trace]
        return DrawnTraffic(stretched, 0)

    def backlog(self, rate: float) -> list[CheckArrival]:
        """Traffic of `rate` checks a second in its order, but all of it due at once."""
        return [arrival._replace(due_s=0.0) for arrival in self.at(rate).arrivals]


def trace_rate(trace: Sequence[CheckArrival]) -> float:
    """The rate of a trace, in checks per second."""
    return len(trace) / max(trace[-1].due_s, 1e-9)


@dataclass(frozen=True)
class RatePoint:
    """A replica's figures at a rate, without the checks that fill its cache.

    `utilisation`: the share of its time that it is at work.
    """

    rate: float
    p50_ms: float
    p95_ms: float
    utilisation: float
    hit_rate: float
    swap_ins: float  # a check
    loads: float  # a check


@dataclass(frozen=True)
class Capacity:
    """A replica's limits.

    `within_target`: its figures at the greatest rate that keeps the p95 target, None if no rate
    does. `lone`: its figures when it is nearly idle.
    """

    saturation_per_second: float
    lone: RatePoint
    within_target: RatePoint | None
    curve: tuple[RatePoint, ...]

    def replicas(self, rate: float) -> int | None:
        """The number of replicas that answer `rate` checks a second within the target; None if no
        number does.
        """
        if self.within_target is None:
            return None
        return math.ceil(rate / self.within_target.rate - 1e-9)


def replay(method: PlannedMethod, arrivals: Sequence[CheckArrival], warm_up: int = 0) -> Replay:
    """Send the arrivals through one replica whose cache is empty at first; the first `warm_up` do
    not count.
    """
    simulation = ReplicaSimulation(
        method.sizes, method.cost, method.suffix_tokens, shares=method.shares
    )
    return simulation.run(arrivals, warm_up)


def at_rate(method: PlannedMethod, traffic: TrafficSource, rate: float) -> RatePoint:
    """A replica's figures at a rate."""
    drawn = traffic.at(rate)
    result = replay(method, drawn.arrivals, drawn.warm_up)
    checks = len(result.latencies_s)
    return RatePoint(
        rate=rate,
        p50_ms=result.percentile_ms(50),
        p95_ms=result.percentile_ms(95),
        utilisation=result.busy_s / result.wall_s,
        hit_rate=result.hit_rate,
        swap_ins=result.work.swap_ins / checks,
        loads=result.work.loads / checks,
    )


def saturation(method: PlannedMethod, traffic: TrafficSource) -> float:
    """The rate, in checks per second, at which a queue that is never empty is answered.

    The more checks a second come, the more conversations lie between two turns of one conversation,
    and the less of it is still in the cache. So the queue is drawn again at the rate at which the
    last one was answered.
    """
    rate = 1.0
    for _ in range(BACKLOGS):
        rate = replay(method, traffic.backlog(rate)).per_second
    return rate


def capacity(
    method: PlannedMethod, traffic: TrafficSource, p95_ms: float, most_busy: float
) -> Capacity:
    """Find a replica's limits: within the target, and at most `most_busy` of saturation."""
    most = saturation(method, traffic)
    lone = at_rate(method, traffic, LOWEST_SHARE * most)
    within = None
    if lone.p95_ms <= p95_ms:
        within = _greatest_rate(method, traffic, p95_ms, lone, most_busy * most)
    curve = [at_rate(method, traffic, share * most) for share in CURVE_SHARES]
    return Capacity(most, lone, within, tuple(curve))


def _greatest_rate(
    method: PlannedMethod, traffic: TrafficSource, p95_ms: float, lone: RatePoint, most: float
) -> RatePoint:
    """The replica's figures at the greatest rate within the target, at most `most` checks a second.

    Found by bisection, unless `most` is within the target.
    """
    point = at_rate(method, traffic, most)
    if point.p95_ms <= p95_ms:
        return point
    best, low, high = lone, lone.rate, most
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        point = at_rate(method, traffic, middle)
        if point.p95_ms <= p95_ms:
            best, low = point, middle
        else:
            high = middle
    return best
