"""Which work goes into a step: the engine's batching, without an engine.

It works as vLLM's scheduler does under our priorities: what has begun goes on, then what waits is
taken in the order of its virtual start (`serve.engine.plan`, the engine's own), earlier by
the tokens that the cache holds of it. A step is limited in tokens, sequences and adapters. The
rules of a conversation come in the step that finishes it. Knows nothing of time.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from serve.engine.dispatch import QUANTUM_STEPS
from serve.engine.plan import FairQueue
from serve.plan.device.step_cost import StepWork

# vLLM's defaults, for recipes whose `engine` does not set them.
STEP_TOKENS, MAX_SEQUENCES = 2048, 128


@dataclass(frozen=True)
class StepLimits:
    """The engine's limits. `slots`: adapters that stay on the device and that a step can use."""

    step_tokens: int
    max_sequences: int
    slots: int
    block_size: int = 32


@dataclass
class WaitingRules:
    """Rules of one check that start together, and their work that is left.

    `shared` tokens are computed once, with the first rule, from position `start` on. Each rule has
    `rule_tokens` behind them. `taken` rules are computed, and `done` tokens of the next one.
    """

    check: int
    rules: list[int]
    start: int
    shared: int
    rule_tokens: int
    virtual_tokens: int  # by how much virtual time advances when all rules are answered
    done: int = 0
    taken: int = 0

    @property
    def left(self) -> int:
        """The number of rules that are not computed yet."""
        return len(self.rules) - self.taken


@dataclass
class ScheduledStep:
    """A step's work, its adapters, and the checks with the number of rules that it answers."""

    work: StepWork = field(default_factory=lambda: StepWork(steps=1))
    adapters: set[int] = field(default_factory=set)
    answered: list[tuple[int, int]] = field(default_factory=list)


class StepScheduler:
    """The queue of a replica. `shares`: whether rules share the conversation, as aLoRAs do.

    `all_have_slots`: then a step does not say which adapters it needs.
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
            start, virtual_tokens = queue.next(check, tokens + self._suffix, shared)
            if start not in groups:
                is_first = not groups
                groups[start] = self._group(check, tokens, cached, is_first=is_first)
            groups[start].rules.append(rule)
            groups[start].virtual_tokens += virtual_tokens
        for start, group in groups.items():
            heapq.heappush(self._waiting, (start - cached, next(self._order), group))

    def _group(self, check: int, tokens: int, cached: int, *, is_first: bool) -> WaitingRules:
        if not self._shares:
            rule_tokens = tokens - cached + self._suffix
            return WaitingRules(check, [], cached, 0, rule_tokens, 0)
        if not is_first:
            return WaitingRules(check, [], tokens, 0, self._suffix, 0)
        return WaitingRules(check, [], cached, tokens - cached, self._suffix, 0)

    def next_step(self) -> ScheduledStep:
        """Take as much waiting work as a step holds."""
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
        """Put as many of the group's rules into the step as fit."""
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
        """Put as much of the group's next rule into the step as fits.

        Returns whether that answers the rule.
        """
        shared_left = max(0, group.shared - group.done)
        tokens = min(self._room(step), group.shared + group.rule_tokens - group.done)
        adapted = max(0, tokens - shared_left)
        _count(step.work, group.start + group.done, tokens)
        step.work.adapted += adapted
        if adapted:
            step.adapters.add(group.rules[group.taken])
        group.done += tokens
        if group.done < group.shared + group.rule_tokens:
            return False
        group.taken += 1
        group.start, group.shared, group.done = group.start + group.shared, 0, 0
        return True

    def _compute_alike(self, group: WaitingRules, step: ScheduledStep) -> int:
        """Put as many of the group's next rules, which are all alike, into the step as fit whole.

        Returns how many.
        """
        seats = self._limits.max_sequences - step.work.sequences
        count = min(group.left, seats, self._room(step) // group.rule_tokens)
        work, tokens = step.work, count * group.rule_tokens
        work.tokens += tokens
        work.adapted += tokens
        work.sequences += count
        work.reads += count * group.start
        work.pairs += tokens * group.start + tokens * group.rule_tokens / 2
        group.taken += count
        return count


def _count(work: StepWork, start: int, tokens: int) -> None:
    """Add a sequence's tokens from position `start` on."""
    work.tokens += tokens
    work.sequences += 1
    work.reads += start
    work.pairs += tokens * start + tokens * tokens / 2
