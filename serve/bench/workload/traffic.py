"""The load that benchmarks put on a server, and the clock beside it. Knows nothing of engines.

A closed loop has a fixed number of workers, each of which submits again when it is answered: it
measures throughput. An open loop submits at given times, whether or not there were answers: it
measures latencies, which a closed loop flatters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Done = Callable[[], bool]


@dataclass(frozen=True)
class Timed:
    """The times of a run of traffic.

    `latencies_s`: one for each request in the order submitted, from when it was due to its answer.
    """

    wall_s: float
    latencies_s: tuple[float, ...]

    @property
    def per_second(self) -> float:
        """Requests answered per second."""
        return len(self.latencies_s) / self.wall_s


def round_robin(adapters: int, requests: int) -> list[int]:
    """The adapter of each request, one after the other: the worst order for an LRU cache."""
    return [number % adapters for number in range(requests)]


def zipf(adapters: int, alpha: float, requests: int, seed: int) -> list[int]:
    """The adapter of each request. The k-th most popular is drawn with a probability proportional
    to k ** -alpha.
    """
    weights = np.arange(1, adapters + 1) ** -float(alpha)
    chosen = np.random.default_rng(seed).choice(adapters, size=requests, p=weights / weights.sum())
    return [int(adapter) for adapter in chosen]


def poisson(per_second: float, requests: int, seed: int) -> list[float]:
    """The time when each request is due, in seconds from the start."""
    gaps = np.random.default_rng(seed).exponential(1 / per_second, requests)
    return [float(due) for due in gaps.cumsum()]


def closed_loop(
    submit: Callable[[int], Done], step: Callable[[], None], requests: int, workers: int
) -> Timed:
    """Keep `workers` requests in flight until `requests` are answered.

    `submit(number)` returns a function that says whether the request is answered.
    """
    latencies = [0.0] * requests
    in_flight: dict[int, tuple[float, Done]] = {}
    submitted = 0
    started = time.perf_counter()
    while submitted < requests or in_flight:
        while submitted < requests and len(in_flight) < workers:
            in_flight[submitted] = (time.perf_counter(), submit(submitted))
            submitted += 1
        step()
        _collect(in_flight, latencies)
    return Timed(time.perf_counter() - started, tuple(latencies))


def open_loop(
    submit: Callable[[int], Done], step: Callable[[], None], due_s: Sequence[float]
) -> Timed:
    """Submit every request when it is due and not before, however many are in flight."""
    latencies = [0.0] * len(due_s)
    in_flight: dict[int, tuple[float, Done]] = {}
    submitted = 0
    started = time.perf_counter()
    while submitted < len(due_s) or in_flight:
        while submitted < len(due_s) and started + due_s[submitted] <= time.perf_counter():
            in_flight[submitted] = (started + due_s[submitted], submit(submitted))
            submitted += 1
        if in_flight:
            step()
            _collect(in_flight, latencies)
        else:
            time.sleep(max(0.0, started + due_s[submitted] - time.perf_counter()))
    return Timed(time.perf_counter() - started, tuple(latencies))


def _collect(in_flight: dict[int, tuple[float, Done]], latencies: list[float]) -> None:
    now = time.perf_counter()
    for number, (since, done) in list(in_flight.items()):
        if done():
            latencies[number] = now - since
            del in_flight[number]
