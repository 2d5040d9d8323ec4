"""The load that benchmarks put on a server, and the clock beside it. Knows nothing of engines.

A fixed number of workers, each of which submits again when it is answered, measures throughput.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class Submitted(Protocol):
    """A request that a server has taken."""

    @property
    def done(self) -> bool: ...


class FleetCounts(NamedTuple):
    """What a server has done since its start."""

    forward_passes: int  # batches that the model has computed
    adapter_loads: int  # from disk
    swap_ins: int  # adapters copied into a slot, or given a place


@dataclass(frozen=True)
class Timed:
    """The times of a run of traffic. `latencies_s`: one for each request in the order submitted."""

    wall_s: float
    latencies_s: tuple[float, ...]

    @property
    def per_second(self) -> float:
        return len(self.latencies_s) / self.wall_s


def zipf(adapters: int, alpha: float, requests: int, seed: int) -> list[int]:
    """The adapter of each request. The k-th most popular is drawn with a probability proportional
    to k ** -alpha.
    """
    weights = np.arange(1, adapters + 1) ** -float(alpha)
    chosen = np.random.default_rng(seed).choice(adapters, size=requests, p=weights / weights.sum())
    return [int(adapter) for adapter in chosen]


def closed_loop(
    submit: Callable[[int], Submitted], step: Callable[[], None], requests: int, workers: int
) -> Timed:
    """Keep `workers` requests in flight until `requests` are answered."""
    latencies = [0.0] * requests
    in_flight: dict[int, tuple[float, Submitted]] = {}
    submitted = 0
    started = time.perf_counter()
    while submitted < requests or in_flight:
        while submitted < requests and len(in_flight) < workers:
            in_flight[submitted] = (time.perf_counter(), submit(submitted))
            submitted += 1
        step()
        now = time.perf_counter()
        for number, (since, request) in list(in_flight.items()):
            if request.done:
                latencies[number] = now - since
                del in_flight[number]
    return Timed(time.perf_counter() - started, tuple(latencies))
