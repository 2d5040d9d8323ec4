"""Timed bursts of checks on a running engine, to which the planner's coefficients are fitted.

A burst is a number of checks that are submitted at once and driven to their end. The planner's own
scheduler counts the work of their steps, so the model is fitted to the work that it will predict.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from guard.conversation.example import Message
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from serve.bench.scores import scores_of_calls
from serve.bench.workload.prompts import (
    common_tokens,
    conversation,
    random_rule_text,
    wordings,
)
from serve.engine import Call, GuardEngine, ScoreRequest
from serve.plan.device.calibration import BurstRow
from serve.plan.device.step_cost import StepWork
from serve.plan.replay.scheduler import StepLimits, StepScheduler

SHORTEST, LONGEST = 80, 3000  # tokens of a conversation
AT_ONCE = (1, 1, 2, 3, 5, 8)  # checks of a burst
# The most tokens of a burst, by whether rules share them: the work of a few seconds.
MOST_TOKENS = {True: 8_000, False: 12_000}


@dataclass(frozen=True)
class BurstPlan:
    """The checks of a burst, each with its conversation's tokens and its number of rules."""

    checks: tuple[tuple[int, int], ...]


def draw_bursts(count: int, most_rules: int, seed: int, *, shares: bool) -> list[BurstPlan]:
    """Draw bursts of all sizes: log-uniform lengths, and one to `most_rules` rules."""
    draw = random.Random(seed)
    drawn = []
    for _ in range(count):
        checks: list[tuple[int, int]] = []
        left = MOST_TOKENS[shares]
        for _ in range(draw.choice(AT_ONCE)):
            tokens = round(SHORTEST * (LONGEST / SHORTEST) ** draw.random())
            rules = max(1, round(most_rules ** draw.random()))
            if not shares:
                rules = min(rules, max(1, left // tokens))
            left -= tokens if shares else tokens * rules
            if left >= 0 or not checks:
                checks.append((tokens, rules))
        drawn.append(BurstPlan(tuple(checks)))
    return drawn


class BurstMeter:
    """Runs bursts of checks by one method's adapters. `limits`: those of the engine."""

    def __init__(
        self, engine: GuardEngine, recipe: Recipe, limits: StepLimits, method: str, *, shares: bool
    ) -> None:
        self._engine, self._method, self._shares = engine, method, shares
        self._prompts, self._limits = PromptBuilder.of(recipe), limits
        self.most_rules = limits.slots
        self._texts = wordings([random_rule_text(recipe)], limits.slots)
        self.suffix_tokens = len(self._prompts.suffix_ids(self._texts[0]))
        self._seed = 0

    def run(self, plan: BurstPlan, pause_s: float = 0.0) -> BurstRow:
        """Time a burst on new conversations, from an empty cache, after a pause."""
        conversations: list[tuple[Message, ...]] = []
        for tokens, _ in plan.checks:
            self._seed += 1
            conversations.append(conversation(self._prompts, tokens, self._seed))
        lengths = [len(self._prompts.prefix_ids(messages)) for messages in conversations]
        rules = [rules for _, rules in plan.checks]
        self._engine.forget()
        time.sleep(pause_s)
        started = time.perf_counter()
        calls = [
            self._submit(messages, count)
            for messages, count in zip(conversations, rules, strict=True)
        ]
        submitted = time.perf_counter()
        steps = 0
        while not all(call.done for call in calls):
            self._engine.step()
            steps += 1
        finished = time.perf_counter()
        scores_of_calls(calls, where=f"bursts of {self._method}")
        return BurstRow(
            method=self._method,
            checks=len(calls),
            conversation_tokens=sum(lengths),
            rules=sum(rules),
            submit_ms=1000 * (submitted - started),
            steps_ms=1000 * (finished - submitted),
            steps=steps,
            work=vars(self.predicted(list(zip(lengths, rules, strict=True)))),
        )

    def predicted(self, checks: Sequence[tuple[int, int]]) -> StepWork:
        """The work of all steps of a burst, according to the planner's scheduler."""
        scaffold = scaffold_tokens(self._prompts, self._limits.block_size)
        scheduler = StepScheduler(self._limits, self.suffix_tokens, shares=self._shares)
        for number, (tokens, rules) in enumerate(checks):
            cached = scaffold if number else 0
            scheduler.submit(number, tokens, cached, tuple(range(rules)))
        work = StepWork()
        while scheduler.is_busy:
            work.add(scheduler.next_step().work)
        return work

    def _submit(self, messages: tuple[Message, ...], rules: int) -> Call:
        return self._engine.submit(
            [
                ScoreRequest(messages, self._texts[rule], f"{self._method}-{rule}")
                for rule in range(rules)
            ]
        )


def scaffold_tokens(prompts: PromptBuilder, block_size: int) -> int:
    """The number of tokens in the whole blocks that every conversation's prompt begins with."""
    first, second = (prompts.prefix_ids((Message("user", text),)) for text in ("one", "two"))
    return common_tokens(first, second) // block_size * block_size
