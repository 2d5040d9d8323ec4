"""A replica on paper: arrivals in, latencies out; and so what one can do. Knows no prices.

It works as `EngineThread` does: checks that have arrived are submitted, then a step runs, and those
that arrive meanwhile wait for its end. Conversations stay in the cache until others need the room.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from serve.plan.batching import AdapterSlots, ReplicaSizes, StepScheduler, StepWork
from serve.plan.deployment import PlannedMethod
from serve.plan.plan_file import Plan
from serve.plan.traffic import CheckArrival, draw_traffic


@dataclass(frozen=True)
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

    @property
    def p50_ms(self) -> float:
        return float(np.percentile(self.latencies_s, 50)) * 1000

    @property
    def p95_ms(self) -> float:
        return float(np.percentile(self.latencies_s, 95)) * 1000

    @property
    def per_second(self) -> float:
        return len(self.latencies_s) / self.wall_s

    @property
    def utilisation(self) -> float:
        """The share of its time that the replica is at work."""
        return self.busy_s / self.wall_s

    @property
    def hit_rate(self) -> float:
        """The share of the conversations' tokens that the cache held."""
        return self.cached_tokens / max(1, self.prompt_tokens)


@dataclass
class ConversationCache:
    """How many tokens of each conversation the cache holds; evicts the least recently used."""

    sizes: ReplicaSizes
    _held: OrderedDict[int, tuple[int, int]] = field(default_factory=OrderedDict)
    _used: int = 0

    def held(self, session: int) -> int:
        """How many tokens of the conversation it holds, in whole blocks."""
        if not self._held:
            return 0
        tokens, _ = self._held.get(session, (0, 0))
        block_size = self.sizes.block_size
        return max(self.sizes.scaffold_tokens, tokens // block_size * block_size)

    def put(self, session: int, tokens: int, copies: int) -> None:
        """Note that the conversation was computed up to `tokens`, in as many copies."""
        self._used -= self._held.pop(session, (0, 0))[1]
        self._held[session] = (tokens, tokens * copies)
        self._used += tokens * copies
        while self._used > self.sizes.cache_tokens and len(self._held) > 1:
            _, (_, evicted) = self._held.popitem(last=False)
            self._used -= evicted


class ReplicaSimulation:
    """One run of arrivals, sorted by the time when they are due, through one replica.

    Its cache is empty at first.
    """

    def __init__(self, method: PlannedMethod) -> None:
        self._sizes, self._cost, self._shares = method.sizes, method.cost, method.shares
        self._slots = AdapterSlots(method.sizes)
        self._scheduler = StepScheduler(method.sizes, method.suffix_tokens, shares=method.shares)
        self._cache = ConversationCache(method.sizes)
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
            if not self._scheduler.is_busy:
                now, is_asleep = max(now, arrivals[submitted].due_s), True
                continue
            step_ms, finished = self._step(work)
            now += (step_ms + (self._cost.wake_ms if is_asleep else 0.0)) / 1000
            is_asleep = False
            for check in finished:
                latencies[check] = now - arrivals[check].due_s
            busy += now - began
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
        return len(self._left) < self._sizes.max_open

    def _submit(self, number: int, arrival: CheckArrival) -> float:
        """Queue the check. Returns the seconds that this takes."""
        cached = min(self._cache.held(arrival.session), arrival.tokens)
        copies = 1 if self._shares else len(arrival.rules)
        self._cache.put(arrival.session, arrival.tokens, copies)
        self._cached_tokens += cached
        self._left[number] = len(arrival.rules)
        rules = self._slots.in_slots_first(arrival.rules)
        self._scheduler.submit(number, arrival.tokens, cached, rules)
        return self._cost.submit_ms(arrival.tokens, len(arrival.rules)) / 1000

    def _step(self, total: StepWork) -> tuple[float, list[int]]:
        """Run a step. Returns the ms that it takes, and the checks that it finishes."""
        step = self._scheduler.next_step()
        step.work.swap_ins = self._slots.use(step.adapters)
        total.add(step.work)
        finished = []
        for check, answered in step.answered:
            self._left[check] -= answered
            if not self._left[check]:
                del self._left[check]
                finished.append(check)
        return self._cost.step_ms(step.work), finished


BACKLOGS = 4  # so many find the rate of saturation to within a tenth, and rather too low
BISECTIONS = 7  # so many find the greatest rate to within a hundredth
LOWEST_SHARE = 0.02  # of the rate of saturation: then a replica is nearly idle


@dataclass(frozen=True)
class Capacity:
    """A replica's limits.

    `rate`: the greatest that keeps the p95 target, and `within_target` what is answered at it; None
    if no rate does. `lone`: what is answered when it is nearly idle.
    """

    saturation_per_second: float
    lone: Replay
    rate: float | None = None
    within_target: Replay | None = None

    def replicas(self, rate: float) -> int | None:
        """How many replicas answer `rate` checks a second within the target; None: no number."""
        if self.rate is None:
            return None
        return math.ceil(rate / self.rate - 1e-9)


def at_rate(method: PlannedMethod, plan: Plan, rate: float) -> Replay:
    drawn = draw_traffic(plan, rate)
    return ReplicaSimulation(method).run(drawn.arrivals, drawn.warm_up)


def backlog(plan: Plan, rate: float) -> list[CheckArrival]:
    """The plan's traffic at this rate, in its order, but all of it due at once."""
    return [arrival._replace(due_s=0.0) for arrival in draw_traffic(plan, rate).arrivals]


def saturation(method: PlannedMethod, plan: Plan) -> float:
    """The rate, in checks per second, at which a queue that is never empty is answered.

    The more checks a second come, the more conversations lie between two turns of one conversation,
    and the less of it is still in the cache. So the queue is drawn again at the rate at which the
    last one was answered.
    """
    rate = 1.0
    for _ in range(BACKLOGS):
        rate = ReplicaSimulation(method).run(backlog(plan, rate)).per_second
    return rate


def capacity(method: PlannedMethod, plan: Plan) -> Capacity:
    """Find a replica's limits: within the plan's target, and no busier than it allows.

    The greatest rate is found by bisection.
    """
    saturated = saturation(method, plan)
    low, high = LOWEST_SHARE * saturated, plan.most_busy * saturated
    lone = best = at_rate(method, plan, low)
    if lone.p95_ms > plan.p95_ms:
        return Capacity(saturated, lone)
    rate = high
    for _ in range(1 + BISECTIONS):
        replay = at_rate(method, plan, rate)
        if replay.p95_ms > plan.p95_ms:
            high = rate
        else:
            best, low = replay, rate
        if low == high:
            break
        rate = (low + high) / 2
    return Capacity(saturated, lone, low, best)
