"""Checks of new conversations on random rules, as they arrive at a running server.

Knows nothing of what is made of their latencies.
"""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from serve.bench.http.load import HttpRun, send
from serve.bench.http.overhead import as_body
from serve.bench.http.server import rule_names
from serve.bench.load import RULES, arrivals

AT_ONCE = 64  # checks that saturate a server: no more than it takes
AT_ONCE_PER_SECOND = 1000.0
SATURATING_DEADLINE_S = 60.0


class OpenLoopTraffic:
    """Open-loop load on the server at `address`, which has RULES[1] rules; `bar` counts answers."""

    def __init__(self, recipe: Recipe, address: str, bar: tqdm) -> None:
        self._prompts = PromptBuilder.of(recipe)
        self._names = rule_names(RULES[1])
        self._address, self._bar = address, bar

    def saturation(self) -> float:
        """Checks a second that are answered when AT_ONCE of them come at once.

        The second of two runs: first times are slow everywhere.
        """
        for seed in (1, 2):
            run, _ = self.run(AT_ONCE_PER_SECOND, AT_ONCE, seed, SATURATING_DEADLINE_S)
        return run.count(200) / run.wall_s

    def run(
        self, rate: float, checks: int, seed: int, deadline_s: float
    ) -> tuple[HttpRun, list[float]]:
        """Checks that come at `rate` a second, and when they were due, in seconds."""
        bodies: list[dict[str, Any]] = []
        due_s: list[float] = []
        for arrival in arrivals(self._prompts, rate, checks, seed):
            rules = [self._names[rule] for rule in arrival.rules]
            bodies.append(as_body(arrival.messages, rules))
            due_s.append(arrival.due_s)
        return send(self._address, bodies, due_s, deadline_s, self._bar.update), due_s
