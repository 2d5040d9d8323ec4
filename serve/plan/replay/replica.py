"""A replica on paper: arrivals in, latencies out.

It works as `EngineThread` does: checks that have arrived are submitted, then a step runs, and those
that arrive meanwhile wait for its end. Conversations stay in the cache until others need the room.
Knows nothing of what a step costs on which device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from serve.plan.device.step_cost import StepCost, StepWork
from serve.plan.replay.scheduler import StepLimits, StepScheduler
from serve.plan.replay.slots import AdapterSlots
from serve.plan.traffic import CheckArrival


@dataclass(frozen=True)
class ReplicaSizes:
    """What a replica has room for.

    `cache_tokens`: tokens whose keys and values the cache holds. `max_open`: checks in the engine
    at once (the server's MAX_OPEN), without a limit where it is None.
    """

    limits: StepLimits
    cache_tokens: int
    adapters: int
    host_adapters: int
    scaffold_tokens: int = 0
    max_open: int | None = None


@dataclass
class Replay:
    """What became of the counted arrivals, in their order; times in seconds.

    `wall_s`: the time to the last answer, from time 0 or, after a warm-up, from the first counted
    arrival. `busy_s`: the part of it at work.
    """

    latencies_s: np.ndarray
    wall_s: float
    busy_s: float
    work: StepWork
    cached_tokens: int
    prompt_tokens: int

    def percentile_ms(self, percent: float) -> float:
        """A percentile of the latencies."""
        return float(np.percentile(self.latencies_s, percent)) * 1000

    @property
    def per_second(self) -> float:
        """Checks answered per second."""
        return len(self.latencies_s) / self.wall_s

    @property
    def hit_rate(self) -> float:
        """The share of the conversations' tokens that the cache held."""
        return self.cached_tokens / max(1, self.prompt_tokens)


@dataclass
class ConversationCache:
    """How many tokens of each conversation the cache holds; evicts the least recently used."""

    capacity: int
    block_size: int
    scaffold: int = 0  # tokens that all conversations begin with
    _held: OrderedDict[int, tuple[int, int]] = field(default_factory=OrderedDict)
    _used: int = 0

    def held(self, session: int) -> int:
        """How many tokens of the conversation it holds, in whole blocks."""
        if not self._held:
            return 0
        tokens, _ = self._held.get(session, (0, 0))
        return max(self.scaffold, tokens // self.block_size * self.block_size)

    def put(self, session: int, tokens: int, copies: int) -> None:
        """Note that the conversation was computed up to `tokens`, in as many copies."""
        self._used -= self._held.pop(session, (0, 0))[1]
        size = tokens * copies
        self._held[session] = (tokens, size)
        self._used += size
        while self._used > self.capacity and len(self._held) > 1:
            _, (_, evicted) = self._held.popitem(last=False)
            self._used -= evicted


def copies_of(rules: int, *, shares: bool) -> int:
    """How many times a check of so many rules computes and keeps its conversation: once where they
    share it, else once for each.
    """
    return 1 if shares else rules


class ReplicaSimulation:
    """One run of arrivals, sorted by the time when they are due, through one replica."""

    def __init__(
        self, sizes: ReplicaSizes, cost: StepCost, suffix_tokens: int, *, shares: bool
    ) -> None:
        self._sizes, self._cost, self._shares = sizes, cost, shares
        self._slots = AdapterSlots(sizes.adapters, sizes.limits.slots, sizes.host_adapters)
        self._scheduler = StepScheduler(
            sizes.limits, suffix_tokens, shares=shares, all_have_slots=self._slots.always_fit
        )
        self._cache = ConversationCache(
            sizes.cache_tokens, sizes.limits.block_size, sizes.scaffold_tokens
        )
        self._left: dict[int, int] = {}  # check -> number of its rules without an answer
        self._cached_tokens = 0

    def run(self, arrivals: Sequence[CheckArrival], warm_up: int = 0) -> Replay:
        """Answer all of them; the first `warm_up` fill the cache and are not counted."""
        now = busy = counted_from_s = 0.0
        work, latencies = StepWork(), np.zeros(len(arrivals))
        submitted, is_asleep = 0, True
        while submitted < len(arrivals) or self._scheduler.is_busy:
            began = now
            while self._may_submit(arrivals, submitted, now):
                if submitted == warm_up > 0:
                    work, busy, self._cached_tokens = StepWork(), 0.0, 0
                    began = counted_from_s = now
                now += self._submit(submitted, arrivals[submitted])
                submitted += 1
            if self._scheduler.is_busy:
                now += self._step(work, is_asleep=is_asleep) / 1000
                is_asleep = False
                for check in self._finished:
                    latencies[check] = now - arrivals[check].due_s
                busy += now - began
            else:
                now, is_asleep = max(now, arrivals[submitted].due_s), True
        return Replay(
            latencies_s=latencies[warm_up:],
            wall_s=now - counted_from_s,
            busy_s=busy,
            work=work,
            cached_tokens=self._cached_tokens,
            prompt_tokens=sum(arrival.tokens for arrival in arrivals[warm_up:]),
        )

    def _may_submit(self, arrivals: Sequence[CheckArrival], number: int, now: float) -> bool:
        if number == len(arrivals) or arrivals[number].due_s > now:
            return False
        return self._sizes.max_open is None or len(self._left) < self._sizes.max_open

    def _submit(self, number: int, arrival: CheckArrival) -> float:
        """Queue the check. Returns the seconds that this takes."""
        # What is recorded is the cache of a server whose rules share conversations.
        recorded = arrival.cached_tokens if self._shares else None
        cached = self._cache.held(arrival.session) if recorded is None else recorded
        cached = min(cached, arrival.tokens)
        copies = copies_of(len(arrival.rules), shares=self._shares)
        self._cache.put(arrival.session, arrival.tokens, copies)
        self._cached_tokens += cached
        self._left[number] = len(arrival.rules)
        rules = self._slots.in_slots_first(arrival.rules)
        self._scheduler.submit(number, arrival.tokens, cached, rules)
        return self._cost.submit_ms(arrival.tokens, len(arrival.rules)) / 1000

    def _step(self, total: StepWork, *, is_asleep: bool) -> float:
        """Run a step. Returns the ms that it takes.

        `is_asleep`: whether it is the first step after a time without work.
        """
        step = self._scheduler.next_step()
        step.work.swap_ins, step.work.loads = self._slots.use(step.adapters)
        total.add(step.work)
        self._finished = []
        for check, answered in step.answered:
            self._left[check] -= answered
            if not self._left[check]:
                del self._left[check]
                self._finished.append(check)
        return self._cost.step_ms(step.work) + (self._cost.wake_ms if is_asleep else 0.0)
