"""Rules over several devices, each with slots for all of its own, against one that swaps.

Sharding costs time because every shard computes the conversation anew; it saves copies of adapters
from host memory and reads from disk. Knows no prices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from serve.plan.capacity import TrafficSource, replay, saturation
from serve.plan.deployment import PlannedMethod
from serve.plan.traffic.arrival import CheckArrival

LOAD_SHARE = 0.5  # of the rate of saturation: where latencies are compared


@dataclass(frozen=True)
class Layout:
    """One way to lay out the rules.

    `device_ms`: the time of all devices together for a check. `p95_ms`: the latency until the last
    shard has answered, at half the rate that saturates one device that swaps.
    """

    shards: int
    device_ms: float
    p95_ms: float
    swap_ins: float  # a check
    loads: float  # a check


@dataclass(frozen=True)
class Sharding:
    """One device that swaps, and as many devices as together have slots for all rules."""

    swapping: Layout
    sharded: Layout

    @property
    def shards_win(self) -> bool:
        """Whether sharding needs less of the devices' time for a check."""
        return self.sharded.shards > 1 and self.sharded.device_ms < self.swapping.device_ms


def sharding(method: PlannedMethod, traffic: TrafficSource) -> Sharding:
    """Both layouts on the same traffic."""
    shards = math.ceil(method.sizes.adapters / method.sizes.limits.slots)
    rate = _rate(method, traffic)
    return Sharding(
        swapping=_layout(method, traffic, 1, rate),
        sharded=_layout(method, traffic, shards, rate),
    )


def _rate(method: PlannedMethod, traffic: TrafficSource) -> float:
    return LOAD_SHARE * saturation(method, traffic)


def _layout(method: PlannedMethod, traffic: TrafficSource, shards: int, rate: float) -> Layout:
    """A layout that puts rule r on shard r modulo `shards`.

    A check goes to the shards that have one of its rules.
    """
    drawn = traffic.at(rate)
    checks = len(drawn.arrivals)
    latencies = np.zeros(checks)
    busy_s, swap_ins, loads = 0.0, 0, 0
    for shard in range(shards):
        numbers, arrivals = _shard_arrivals(drawn.arrivals, shard, shards)
        if not arrivals:
            continue
        result = replay(_shard_replica(method, shard, shards), arrivals)
        latencies[numbers] = np.maximum(latencies[numbers], result.latencies_s)
        busy_s += result.busy_s
        swap_ins += result.work.swap_ins
        loads += result.work.loads
    p95_ms = 1000 * float(np.percentile(latencies[drawn.warm_up :], 95))
    return Layout(shards, 1000 * busy_s / checks, p95_ms, swap_ins / checks, loads / checks)


def _shard_arrivals(
    arrivals: Sequence[CheckArrival], shard: int, shards: int
) -> tuple[list[int], list[CheckArrival]]:
    """The numbers of the checks that have a rule on the shard, and the shard's part of them."""
    numbers, shard_arrivals = [], []
    for number, arrival in enumerate(arrivals):
        rules = tuple(rule // shards for rule in arrival.rules if rule % shards == shard)
        if rules:
            numbers.append(number)
            shard_arrivals.append(arrival._replace(rules=rules))
    return numbers, shard_arrivals


def _shard_replica(method: PlannedMethod, shard: int, shards: int) -> PlannedMethod:
    """The method's replica with only the shard's rules."""
    adapters = len(range(shard, method.sizes.adapters, shards))
    return replace(method, sizes=replace(method.sizes, adapters=adapters))
