"""Traffic put on a running engine as it arrives. Knows nothing of reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from serve.bench.scores import scores_of_calls
from serve.bench.workload.arrivals import RULES, Arrival, arrivals
from serve.bench.workload.prompts import random_rule_text, wordings
from serve.bench.workload.traffic import Done, Timed, open_loop
from serve.engine import Call, GuardEngine, ScoreRequest


@dataclass(frozen=True)
class LoadRun:
    """One method under one run of traffic."""

    offered_per_second: float
    timed: Timed
    verdicts: int
    computed_tokens: int
    needed_tokens: int
    swap_ins: int

    @property
    def growth(self) -> float:
        """The median latency of the last third of the conversations over that of the first."""
        third = max(1, len(self.timed.latencies_s) // 3)
        first, last = self.timed.latencies_s[:third], self.timed.latencies_s[-third:]
        return float(np.median(last) / np.median(first))


class LoadDriver:
    """Puts traffic on a running engine. `rules`: the least and the most of a conversation."""

    def __init__(self, engine: GuardEngine, recipe: Recipe, rules: tuple[int, int] = RULES) -> None:
        self._engine, self._prompts, self._rules = engine, PromptBuilder.of(recipe), rules
        # The texts that the rules' adapters read.
        self._texts = wordings([random_rule_text(recipe)], rules[1])

    def traffic(self, rate: float, checks: int, seed: int) -> list[Arrival]:
        """Draw a run's conversations."""
        return arrivals(self._prompts, rate, checks, seed, self._rules)

    def run(self, method: str, traffic: Sequence[Arrival]) -> LoadRun:
        """Put the conversations to the method's adapters as they arrive.

        Raises GuardError if a request is refused.
        """
        self._engine.forget()
        swap_ins_before = self._engine.counters.swap_ins
        calls: list[Call] = []

        def submit(number: int) -> Done:
            call = self._engine.submit(self._requests(method, traffic[number]))
            calls.append(call)
            return lambda: call.done

        timed = open_loop(submit, self._engine.step, [arrival.due_s for arrival in traffic])
        scores = scores_of_calls(calls, where=method)
        return LoadRun(
            offered_per_second=len(traffic) / traffic[-1].due_s,
            timed=timed,
            verdicts=len(scores),
            computed_tokens=sum(score.computed_tokens for score in scores),
            needed_tokens=sum(self._needed(arrival) for arrival in traffic),
            swap_ins=self._engine.counters.swap_ins - swap_ins_before,
        )

    def _requests(self, method: str, arrival: Arrival) -> list[ScoreRequest]:
        return [
            ScoreRequest(arrival.messages, self._texts[rule], f"{method}-{rule}")
            for rule in arrival.rules
        ]

    def _needed(self, arrival: Arrival) -> int:
        """The needed tokens: the conversation's once, and those of every suffix."""
        suffixes = sum(len(self._prompts.suffix_ids(self._texts[rule])) for rule in arrival.rules)
        return len(self._prompts.prefix_ids(arrival.messages)) + suffixes
