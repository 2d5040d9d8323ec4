"""Which work goes into a step: the engine's batching, without an engine. Knows nothing of time.

It works as vLLM's scheduler does under our priorities: what has begun goes on, then what waits is
taken in the order of its virtual start (`serve.engine.plan`, the engine's own), earlier by
the tokens that the cache holds of it. A step is limited in tokens, sequences and adapters. The
rules of a conversation come in the step that finishes it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field

from vllm_alora.weights.slots import Heat

from serve.engine.dispatch import QUANTUM_STEPS
from serve.engine.plan import FairQueue
from serve.engine.thread.engine_thread import MAX_OPEN

# vLLM's defaults, for recipes whose `engine` does not set them.
STEP_TOKENS, MAX_SEQUENCES = 2048, 128


@dataclass
class StepWork:
    """The work of one step or of several. `pairs`: those of a token and one it attends to."""

    steps: int = 0
    tokens: int = 0
    pairs: float = 0.0
    sequences: int = 0
    swap_ins: int = 0

    def add(self, addend: StepWork) -> None:
        for name in vars(addend):
            setattr(self, name, getattr(self, name) + getattr(addend, name))


@dataclass(frozen=True)
class ReplicaSizes:
    """What a step and a replica have room for.

    `slots`: adapters that stay on the device and that a step can use. `cache_tokens`: tokens whose
    keys and values the cache holds. `max_open`: checks in the engine at once.
    """

    step_tokens: int
    max_sequences: int
    slots: int
    block_size: int = 32
    cache_tokens: int = 0
    adapters: int = 0
    scaffold_tokens: int = 0  # that all conversations begin with
    max_open: int = MAX_OPEN


@dataclass
class WaitingRules:
    """Rules of one check that start together, and their work that is left.

    `shared` tokens are computed once, with the first rule, from position `start` on. Each rule has
    `rule_tokens` behind them. `done` tokens of the next rule are computed.
    """

    check: int
    start: int
    shared: int
    rule_tokens: int
    rules: list[int] = field(default_factory=list)
    virtual_tokens: int = 0  # by how much virtual time advances when all rules are answered
    done: int = 0


@dataclass
class ScheduledStep:
    """A step's work, its adapters, and the checks with the number of rules that it answers."""

    work: StepWork = field(default_factory=lambda: StepWork(steps=1))
    adapters: set[int] = field(default_factory=set)
    answered: list[tuple[int, int]] = field(default_factory=list)


class StepScheduler:
    """The queue of a replica. `shares`: whether rules share the conversation, as aLoRAs do."""

    def __init__(self, sizes: ReplicaSizes, suffix_tokens: int, *, shares: bool) -> None:
        self._sizes, self._suffix, self._shares = sizes, suffix_tokens, shares
        self._waiting: list[tuple[int, int, WaitingRules]] = []
        self._begun: list[WaitingRules] = []
        self._order = itertools.count()
        self._virtual_time = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._begun)

    def submit(self, check: int, tokens: int, cached: int, rules: Collection[int]) -> None:
        """Queue a check of a conversation of which the cache holds `cached` tokens."""
        queue = FairQueue(self._virtual_time, QUANTUM_STEPS * self._sizes.step_tokens)
        groups: dict[int, WaitingRules] = {}
        for rule in rules:
            shared = tokens if self._shares else 0
            start, virtual_tokens = queue.next(check, tokens + self._suffix, shared)
            if start not in groups:
                computed = cached
                if groups and self._shares:
                    computed = tokens
                left, rule_tokens = tokens - computed, self._suffix
                if not self._shares:
                    left, rule_tokens = 0, left + self._suffix
                groups[start] = WaitingRules(check, computed, shared=left, rule_tokens=rule_tokens)
            groups[start].rules.append(rule)
            groups[start].virtual_tokens += virtual_tokens
        for start, group in groups.items():
            heapq.heappush(self._waiting, (start - cached, next(self._order), group))

    def next_step(self) -> ScheduledStep:
        """Take as much waiting work as a step holds."""
        step = ScheduledStep()
        for group in self._begun:
            self._take(group, step)
        while self._waiting and self._room(step) > 0:
            _, _, group = self._waiting[0]
            if not self._take(group, step):
                break
            heapq.heappop(self._waiting)
            self._begun.append(group)
        self._begun = [group for group in self._begun if group.rules]
        return step

    def _room(self, step: ScheduledStep) -> int:
        if step.work.sequences >= self._sizes.max_sequences:
            return 0
        return self._sizes.step_tokens - step.work.tokens

    def _take(self, group: WaitingRules, step: ScheduledStep) -> bool:
        """Put as many of the group's rules into the step as fit. Returns whether any work did."""
        before, waiting = step.work.sequences, len(group.rules)
        while group.rules and self._has_place(group.rules[0], step):
            if not self._compute(group, step):
                break
        if answered := waiting - len(group.rules):
            step.answered.append((group.check, answered))
            if not group.rules:
                self._virtual_time += group.virtual_tokens
        return step.work.sequences > before

    def _has_place(self, rule: int, step: ScheduledStep) -> bool:
        if self._room(step) <= 0:
            return False
        return len(step.adapters) < self._sizes.slots or rule in step.adapters

    def _compute(self, group: WaitingRules, step: ScheduledStep) -> bool:
        """Put as much of the group's next rule into the step as fits.

        Returns whether that answers the rule.
        """
        wanted = group.shared + group.rule_tokens - group.done
        tokens = min(self._room(step), wanted)
        start, work = group.start + group.done, step.work
        work.tokens += tokens
        work.sequences += 1
        work.pairs += tokens * start + tokens * tokens / 2
        if group.done + tokens > group.shared:
            step.adapters.add(group.rules[0])
        if tokens < wanted:
            group.done += tokens
            return False
        group.rules.pop(0)
        group.start, group.shared, group.done = group.start + group.shared, 0, 0
        return True


class AdapterSlots:
    """Slots on the device, by the eviction policy of the plugin; all adapters are in host memory.

    At the start the first adapters are in slots, as after an engine has loaded them.
    """

    def __init__(self, sizes: ReplicaSizes) -> None:
        self._slots = sizes.slots
        self._heat = Heat()
        self._in_slots = dict.fromkeys(range(min(sizes.adapters, sizes.slots)))
        self._always_fit = sizes.adapters <= sizes.slots

    def in_slots_first(self, rules: Collection[int]) -> list[int]:
        """The rules in the order in which the engine submits them."""
        return sorted(rules, key=lambda rule: rule not in self._in_slots)

    def use(self, adapters: Collection[int]) -> int:
        """Use these adapters in a step. Returns how many are copied into a slot."""
        if self._always_fit:
            return 0
        self._heat.begin(adapters)
        return sum(self._swap_in(adapter) for adapter in adapters)

    def _swap_in(self, adapter: int) -> int:
        if adapter in self._in_slots:
            return 0
        self._heat.swap_in(adapter)
        if len(self._in_slots) >= self._slots:
            del self._in_slots[self._heat.coldest(self._in_slots)]
        self._in_slots[adapter] = None
        return 1
