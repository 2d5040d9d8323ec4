"""Which work goes into a step: the engine's batching, without an engine.

As vLLM's scheduler under our priorities: what has begun goes on, then what waits in the order of
its virtual start (`serve.engine.fair_queue`, the engine's own), ahead by what the cache holds
of it; up to so many tokens, sequences and adapters a step. The rules of a conversation come in the
step that finishes it. Knows nothing of time.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from serve.engine.dispatch import QUANTUM_STEPS
from serve.engine.fair_queue import FairQueue
from serve.plan.device.step_cost import StepWork

# vLLM's own, where a recipe's `engine` names none.
STEP_TOKENS, MAX_SEQUENCES = 2048, 128


@dataclass(frozen=True)
class StepLimits:
    """The engine's sizes. `slots`: adapters that a step can use, and that stay on the device."""

    step_tokens: int
    max_sequences: int
    slots: int
    block_size: int = 32


@dataclass
class WaitingRules:
    """Rules of one check that start together, and what is left of their work.

    `shared` tokens are computed once, with the first rule, from position `start` on; each rule has
    `own` tokens behind them. `done` of the rule in hand are computed.
    """

    check: int
    rules: list[int]
    start: int
    shared: int
    own: int
    virtual_tokens: int  # by which virtual time advances when all are answered
    done: int = 0
    taken: int = 0

    @property
    def left(self) -> int:
        """Rules that are not computed yet."""
        return len(self.rules) - self.taken


@dataclass
class ScheduledStep:
    """A step's work, its adapters, and how many rules of which check it answers."""

    work: StepWork = field(default_factory=lambda: StepWork(steps=1))
    adapters: set[int] = field(default_factory=set)
    answered: list[tuple[int, int]] = field(default_factory=list)


class StepScheduler:
    """The queue of a replica. `shares`: whether rules share the conversation, as aLoRAs do.

    Where all have slots, a step does not say which adapters it needs.
    """

    def __init__(
        self,
        limits: StepLimits,
        suffix_tokens: int,
        *,
        shares: bool,
        all_have_slots: bool = False,
    ) -> None:
        self._limits, self._suffix, self._shares = limits, suffix_tokens, shares
        self._all_have_slots = all_have_slots
        self._waiting: list[tuple[int, int, WaitingRules]] = []
        self._begun: list[WaitingRules] = []
        self._order = itertools.count()
        self.virtual_time = 0

    @property
    def is_busy(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting or self._begun)

    def submit(self, check: int, tokens: int, cached: int, rules: tuple[int, ...]) -> None:
        """Queue a check of a conversation of which the cache holds `cached` tokens."""
        queue = FairQueue(self.virtual_time, QUANTUM_STEPS * self._limits.step_tokens)
        groups: dict[int, WaitingRules] = {}
        for rule in rules:
            shared = tokens if self._shares else 0
            start, own = queue.next(check, tokens + self._suffix, shared)
            if start not in groups:
                is_first = not groups
                groups[start] = self._group(check, tokens, cached, is_first=is_first)
            groups[start].rules.append(rule)
            groups[start].virtual_tokens += own
        for start, group in groups.items():
            heapq.heappush(self._waiting, (start - cached, next(self._order), group))

    def _group(self, check: int, tokens: int, cached: int, *, is_first: bool) -> WaitingRules:
        if not self._shares:
            own = tokens - cached + self._suffix
            return WaitingRules(check, [], cached, 0, own, 0)
        if not is_first:
            return WaitingRules(check, [], tokens, 0, self._suffix, 0)
        return WaitingRules(check, [], cached, tokens - cached, self._suffix, 0)

    def next_step(self) -> ScheduledStep:
        """Take as much as a step holds."""
        step = ScheduledStep()
        begun, self._begun = self._begun, []
        for group in begun:
            self._take(group, step)
            if group.left:
                self._begun.append(group)
        skipped: list[tuple[int, int, WaitingRules]] = []
        while self._waiting and self._room(step) > 0:
            entry = heapq.heappop(self._waiting)
            group = entry[2]
            before = step.work.sequences
            self._take(group, step)
            if group.left and (group.done or group.taken):
                self._begun.append(group)
            elif group.left:
                skipped.append(entry)
            if step.work.sequences == before:  # nothing more fits
                break
        for entry in skipped:
            heapq.heappush(self._waiting, entry)
        return step

    def _room(self, step: ScheduledStep) -> int:
        if step.work.sequences >= self._limits.max_sequences:
            return 0
        return self._limits.step_tokens - step.work.tokens

    def _take(self, group: WaitingRules, step: ScheduledStep) -> None:
        """Put what fits of the group into the step."""
        answered = 0
        while group.left and self._has_place(group.rules[group.taken], step):
            if not self._compute(group, step):
                break
            answered += 1
            if self._all_have_slots:
                answered += self._compute_alike(group, step)
        if answered:
            step.answered.append((group.check, answered))
            if not group.left:
                self.virtual_time += group.virtual_tokens

    def _has_place(self, rule: int, step: ScheduledStep) -> bool:
        if self._room(step) <= 0:
            return False
        is_free = self._all_have_slots or len(step.adapters) < self._limits.slots
        return is_free or rule in step.adapters

    def _compute(self, group: WaitingRules, step: ScheduledStep) -> bool:
        """As much of the group's next rule as fits; whether that answers it."""
        shared_left = max(0, group.shared - group.done)
        tokens = min(self._room(step), group.shared + group.own - group.done)
        own = max(0, tokens - shared_left)
        _count(step.work, group.start + group.done, tokens)
        step.work.adapted += own
        if own:
            step.adapters.add(group.rules[group.taken])
        group.done += tokens
        if group.done < group.shared + group.own:
            return False
        group.taken += 1
        group.start, group.shared, group.done = group.start + group.shared, 0, 0
        return True

    def _compute_alike(self, group: WaitingRules, step: ScheduledStep) -> int:
        """As many of the group's next rules as fit whole, which are all alike; how many."""
        seats = self._limits.max_sequences - step.work.sequences
        count = min(group.left, seats, self._room(step) // group.own)
        work, tokens = step.work, count * group.own
        work.tokens += tokens
        work.adapted += tokens
        work.sequences += count
        work.reads += count * group.start
        work.pairs += tokens * group.start + tokens * group.own / 2
        group.taken += count
        return count


def _count(work: StepWork, start: int, tokens: int) -> None:
    """A sequence's tokens from position `start` on."""
    work.tokens += tokens
    work.sequences += 1
    work.reads += start
    work.pairs += tokens * start + tokens * tokens / 2
