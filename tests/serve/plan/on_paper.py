"""Replicas and traffic small enough to reckon by hand. Tests only."""

from __future__ import annotations

from dataclasses import dataclass

from serve.plan.device.calibration import FEATURES, SUBMIT_FEATURES, FittedCost
from serve.plan.device.step_cost import StepWork
from serve.plan.replay.replica import ReplicaSizes
from serve.plan.replay.scheduler import StepLimits
from serve.plan.traffic import CheckArrival


@dataclass(frozen=True)
class ByTokens:
    """A StepCost that knows tokens, swap-ins and loads alone; ms each."""

    token_ms: float = 1.0
    swap_in_ms: float = 0.0
    load_ms: float = 0.0
    wake_ms: float = 0.0

    def step_ms(self, work: StepWork) -> float:
        copies = work.swap_ins * self.swap_in_ms + work.loads * self.load_ms
        return work.tokens * self.token_ms + copies

    def submit_ms(self, tokens: int, rules: int) -> float:
        return 0.0


def limits(**replaced: int) -> StepLimits:
    """Of steps that hold 100 tokens, 50 sequences and 50 adapters, with blocks of one token."""
    fields = {"step_tokens": 100, "max_sequences": 50, "slots": 50, "block_size": 1}
    return StepLimits(**(fields | replaced))


def sizes(adapters: int = 50, host: int = 50, cache: int = 10**9, **replaced: int) -> ReplicaSizes:
    return ReplicaSizes(limits(**replaced), cache, adapters, host)


def check(due_s: float, tokens: int, rules: int = 1, session: int = 0) -> CheckArrival:
    return CheckArrival(due_s, session, tokens, tuple(range(rules)))


def linear(**step: float) -> FittedCost:
    """A FittedCost with these coefficients of FEATURES, the others 0."""
    return FittedCost(
        step=dict.fromkeys(FEATURES, 0.0) | step, submit=dict.fromkeys(SUBMIT_FEATURES, 0.0)
    )
