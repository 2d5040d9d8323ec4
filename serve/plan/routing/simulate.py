"""Many replicas on paper: each answers one check after the other, and keeps conversations.

Replicas leave, and others with empty caches join in their place; a leaving replica finishes what it
has begun. Batching within a replica is left out (`serve.plan.replay` has it): a check waits for
those before it. Knows nothing of how a replica is chosen.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from serve.plan.replay.replica import ConversationCache, copies_of
from serve.plan.routing.ring import Router
from serve.plan.routing.turns import ConversationTurn, TurnArrivals

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.025, 0.5  # as Ray Serve's router
ServiceS = Callable[[int, int, int], float]  # tokens, cached tokens, rules -> seconds


@dataclass(frozen=True)
class ReplicaRoom:
    """A replica's limits: tokens in its cache, and checks at once before it refuses."""

    cache_tokens: int
    block_size: int
    max_ongoing: int


@dataclass(frozen=True)
class RoutingOutcome:
    """What became of the counted turns.

    `affinity`: the share of later turns at the replica of the turn before. `hit_rate`: the share of
    the tokens computed by an earlier turn that were still in the cache. `utilisation`: the share of
    their time that replicas are at work, from where turns are counted to the last answer.
    `refused`: the share of turns that their first choice refused. `busiest`: the busiest replica's
    work in that time over the mean, among those that were there from the beginning to the end; 0 if
    none worked. `counted`: the number of turns.
    """

    affinity: float
    hit_rate: float
    p50_ms: float
    p95_ms: float
    utilisation: float
    refused: float
    busiest: float
    counted: int


@dataclass
class SimulatedReplica:
    """A replica's queue, as the times when its checks will be finished, and its cache.

    `busy_s`: how long it is at work from `counted_from_s` on.
    """

    cache: ConversationCache
    counted_from_s: float
    finishes_s: deque[float] = field(default_factory=deque)
    busy_s: float = 0.0

    def ongoing(self, now: float) -> int:
        """The number of checks that it has now."""
        while self.finishes_s and self.finishes_s[0] <= now:
            self.finishes_s.popleft()
        return len(self.finishes_s)

    def serve(self, now: float, service_s: float) -> float:
        """Put a check at the end of the queue. Returns the time when it will be finished."""
        begins_s = max(now, self.finishes_s[-1] if self.finishes_s else now)
        finishes_s = begins_s + service_s
        self.finishes_s.append(finishes_s)
        self.busy_s += max(0.0, finishes_s - max(begins_s, self.counted_from_s))
        return finishes_s


@dataclass
class TurnCounts:
    """The counts of a run so far."""

    latencies_s: list[float] = field(default_factory=list)
    later: int = 0
    stayed: int = 0
    held: int = 0
    reusable: int = 0
    refused: int = 0


class FleetSimulation:
    """Replicas behind a router. Time is in seconds from the first turn.

    `churn`: the share of replicas that is replaced each minute, one at a time. `shares`: whether
    the rules of a check share one copy of its conversation in the cache.
    """

    def __init__(
        self,
        replicas: int,
        room: ReplicaRoom,
        service_s: ServiceS,
        router: Router,
        churn: float,
        *,
        shares: bool,
    ) -> None:
        self._room, self._service_s, self._router = room, service_s, router
        self._shares = shares
        self._replicas: dict[int, SimulatedReplica] = {}
        self._gone: list[SimulatedReplica] = []
        self._first_replicas = self._next_number = replicas
        self._between_changes_s = np.inf
        if churn > 0:
            self._between_changes_s = 60 / (churn * replicas)
        self._last: dict[int, int] = {}  # session -> the replica of its last turn
        self._counts = TurnCounts()
        self._counted_from_s = self._finished_s = 0.0

    def run(self, arrivals: TurnArrivals, seed: int = 0) -> RoutingOutcome:
        """Answer all turns."""
        draw = np.random.default_rng(seed)
        turns = arrivals.listed()
        self._counted_from_s = arrivals.counted_from_s
        self._replicas = {number: self._fresh() for number in range(self._first_replicas)}
        # Turns that every replica refused: (time of the next attempt, number, attempts so far).
        retries: list[tuple[float, int, int]] = []
        next_change_s, number = float(draw.exponential(self._between_changes_s)), 0
        while number < len(turns) or retries:
            if retries and (number == len(turns) or retries[0][0] <= turns[number].due_s):
                now, turn, attempts = heapq.heappop(retries)
            else:
                now, turn, attempts = turns[number].due_s, number, 0
                number += 1
            while next_change_s <= now:
                self._replace_one(draw)
                next_change_s += float(draw.exponential(self._between_changes_s))
            if not self._answer(turns[turn], now, attempts):
                pause_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**attempts)
                heapq.heappush(retries, (now + pause_s, turn, attempts + 1))
        return self._outcome()

    def _fresh(self) -> SimulatedReplica:
        cache = ConversationCache(self._room.cache_tokens, self._room.block_size)
        return SimulatedReplica(cache, self._counted_from_s)

    def _replace_one(self, draw: np.random.Generator) -> None:
        numbers = list(self._replicas)
        leaving = numbers[int(draw.integers(len(numbers)))]
        self._router.remove(leaving)
        self._gone.append(self._replicas.pop(leaving))
        self._replicas[self._next_number] = self._fresh()
        self._router.add(self._next_number)
        self._next_number += 1

    def _answer(self, turn: ConversationTurn, now: float, attempts: int) -> bool:
        """Give the turn to the first replica that takes it. Returns whether one does."""
        for rank, number in enumerate(self._router.ranked(turn.session)):
            if self._replicas[number].ongoing(now) < self._room.max_ongoing:
                self._serve(turn, now, number)
                return True
            if rank == 0 and attempts == 0 and turn.due_s >= self._counted_from_s:
                self._counts.refused += 1
        return False

    def _serve(self, turn: ConversationTurn, now: float, number: int) -> None:
        replica, counts = self._replicas[number], self._counts
        held = min(replica.cache.held(turn.session), turn.tokens)
        replica.cache.put(turn.session, turn.tokens, copies_of(turn.rules, shares=self._shares))
        finished_s = replica.serve(now, self._service_s(turn.tokens, held, turn.rules))
        self._finished_s = max(self._finished_s, finished_s)
        if turn.due_s >= self._counted_from_s:
            counts.latencies_s.append(finished_s - turn.due_s)
            counts.held += min(held, turn.earlier_tokens)
            counts.reusable += turn.earlier_tokens
            if turn.earlier_tokens:
                counts.later += 1
                counts.stayed += self._last.get(turn.session) == number
        self._last[turn.session] = number

    def _outcome(self) -> RoutingOutcome:
        counts = self._counts
        all_replicas = [*self._replicas.values(), *self._gone]
        busy_s = sum(replica.busy_s for replica in all_replicas)
        span_s = (self._finished_s - self._counted_from_s) * len(self._replicas)
        latencies_ms = 1000 * np.asarray(counts.latencies_s or [0.0])
        p50_ms, p95_ms = np.percentile(latencies_ms, (50, 95))
        return RoutingOutcome(
            affinity=counts.stayed / max(1, counts.later),
            hit_rate=counts.held / max(1, counts.reusable),
            p50_ms=float(p50_ms),
            p95_ms=float(p95_ms),
            utilisation=busy_s / span_s if span_s > 0 else 0.0,
            refused=counts.refused / max(1, len(counts.latencies_s)),
            busiest=self._busiest(),
            counted=len(counts.latencies_s),
        )

    def _busiest(self) -> float:
        """The busiest replica's work over the mean. Replicas that were there for only a part of the
        time are left out, because they have less work.
        """
        busy_s: list[float] = []
        for number, replica in self._replicas.items():
            if number < self._first_replicas:
                busy_s.append(replica.busy_s)
        total_s = sum(busy_s)
        return max(busy_s) * len(busy_s) / total_s if total_s else 0.0
