"""The load that benchmarks put on a server, and the clock beside it. Knows nothing of engines.
Conversations of real lengths, each with some of the rules, arrive by a Poisson process. A closed
loop has a fixed number of workers, each of which submits again when it is answered: it measures
throughput. An open loop submits at given times, whether or not there were answers: it measures
latencies, which a closed loop flatters.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from guard.conversation.example import Message
from guard.prompt.decoder import PromptBuilder
from serve.bench.workload.prompts import conversation

RULES = (5, 20)  # of a conversation, least and most
# The 0, 5, 10, … 100 % quantiles of the prompts' lengths in the tiny base's tokens:
# of every eighth of SGD's 17,193 dialogues (Rastogi et al., 2020).
# fmt: off
LENGTHS = (87, 163, 185, 206, 221, 236, 251, 265, 278, 289, 302, 315, 326, 339, 354, 371, 392, 416,
           443, 490, 740)
# fmt: on


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
    """The times of a run of traffic. `latencies_s`: one for each request in the order submitted,
    from when it was due to its answer.
    """

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


def poisson(per_second: float, requests: int, seed: int) -> list[float]:
    gaps = np.random.default_rng(seed).exponential(1 / per_second, requests)
    return [float(due) for due in gaps.cumsum()]


@dataclass(frozen=True)
class Arrival:
    """A conversation, the time when it arrives from the start, and the numbers of its rules."""

    messages: tuple[Message, ...]
    due_s: float
    rules: tuple[int, ...]


def arrivals(
    prompts: PromptBuilder, rate: float, checks: int, seed: int, rules: tuple[int, int] = RULES
) -> list[Arrival]:
    """Draw conversations of real lengths that arrive by a Poisson process of `rate` a second. No
    two seeds have a conversation in common. `rules`: the least and the most rules of a
    conversation; there are as many rules as the most.
    """
    least, most = rules
    draw = random.Random(seed)
    quantiles = np.linspace(0, 100, len(LENGTHS))
    lengths = [
        round(float(np.interp(draw.uniform(0, 100), quantiles, LENGTHS))) for _ in range(checks)
    ]
    drawn = []
    for number, due_s in enumerate(poisson(rate, checks, seed)):
        messages = conversation(prompts, lengths[number], (seed << 32) + number)
        count = draw.randint(least, most)
        drawn.append(Arrival(messages, due_s, tuple(draw.sample(range(most), count))))
    return drawn


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
        _collect(in_flight, latencies)
    return Timed(time.perf_counter() - started, tuple(latencies))


def open_loop(
    submit: Callable[[int], Submitted], step: Callable[[], None], due_s: Sequence[float]
) -> Timed:
    """Submit every request when it is due and not before, however many are in flight."""
    latencies = [0.0] * len(due_s)
    in_flight: dict[int, tuple[float, Submitted]] = {}
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


def _collect(in_flight: dict[int, tuple[float, Submitted]], latencies: list[float]) -> None:
    now = time.perf_counter()
    for number, (since, request) in list(in_flight.items()):
        if request.done:
            latencies[number] = now - since
            del in_flight[number]
