"""Checks of new conversations on random rules, as they arrive at a running server.

Knows nothing of what their latencies are used for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from serve.bench.http.load import HttpRun, send
from serve.bench.http.overhead import as_body
from serve.bench.http.server import rule_names
from serve.bench.workload.arrivals import RULES, arrivals
from serve.engine.thread.engine_thread import MAX_OPEN

AT_ONCE = 2 * MAX_OPEN  # checks under way that saturate a server: half of them wait
SATURATING_CHECKS = 8 * AT_ONCE
SATURATING_DEADLINE_S = 60.0


class OpenLoopTraffic:
    """Open-loop load on the server at `address`, which has RULES[1] rules; `bar` counts answers."""

    def __init__(self, recipe: Recipe, address: str, bar: tqdm) -> None:
        self._prompts = PromptBuilder.of(recipe)
        self._names = rule_names(RULES[1])
        self._address, self._bar = address, bar

    def saturation(self) -> float:
        """The checks a second that are answered while AT_ONCE of them are under way.

        The first and the last quarter of the answers do not count: at first the server is slower
        and batches are not yet full, at the end they are no longer full.
        """
        bodies, _ = self._drawn(1.0, SATURATING_CHECKS, seed=1)
        at_once = [0.0] * len(bodies)
        run = send(self._address, bodies, at_once, SATURATING_DEADLINE_S, self._bar.update, AT_ONCE)
        return steady_rate(run.answered_s)

    def run(
        self, rate: float, checks: int, seed: int, deadline_s: float
    ) -> tuple[HttpRun, list[float]]:
        """Send checks at `rate` a second. Returns the run, and when each was due in seconds."""
        bodies, due_s = self._drawn(rate, checks, seed)
        return send(self._address, bodies, due_s, deadline_s, self._bar.update), due_s

    def _drawn(
        self, rate: float, checks: int, seed: int
    ) -> tuple[list[dict[str, Any]], list[float]]:
        bodies: list[dict[str, Any]] = []
        due_s: list[float] = []
        for arrival in arrivals(self._prompts, rate, checks, seed):
            rules = [self._names[rule] for rule in arrival.rules]
            bodies.append(as_body(arrival.messages, rules))
            due_s.append(arrival.due_s)
        return bodies, due_s


def steady_rate(answered_s: Sequence[float]) -> float:
    """The answers a second between the first quarter and the last, from each one's time in seconds.

    Raises GuardError if there are too few.
    """
    in_order, quarter = sorted(answered_s), len(answered_s) // 4
    if not quarter:
        problem, remedy = "hardly any check was answered", "See the server's log"
        raise GuardError(problem, got=f"{len(answered_s)} answers", remedy=remedy)
    return 2 * quarter / (in_order[3 * quarter - 1] - in_order[quarter - 1])
