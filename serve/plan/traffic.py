"""Checks that arrive, drawn from a plan's distributions. Knows nothing of what answers them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from serve.plan.plan_file import Plan, PlannedTraffic

# A conversation of several turns lasts exponentially long, `turns * think_s` in the mean: the sum
# of geometrically many exponential pauses is exponential. 99 % end within so many times the mean.
WARM_UP_LENGTHS = math.log(100)


class CheckArrival(NamedTuple):
    """One check of a replica's or a deployment's traffic.

    `due_s` counts from the beginning of the traffic. `tokens`: the length of the conversation's
    prompt so far, up to where the rules' suffixes begin. Checks of one `session` are turns of one
    conversation that grows.
    """

    due_s: float
    session: int
    tokens: int
    rules: tuple[int, ...]


@dataclass(frozen=True)
class DrawnTraffic:
    """Arrivals in order; the first `warm_up` of them fill the cache and are not counted."""

    arrivals: list[CheckArrival]
    warm_up: int


def draw_traffic(plan: Plan, rate: float) -> DrawnTraffic:
    """About as many checks as the plan simulates, at `rate` a second, after a warm-up.

    Conversations begin by a Poisson process. Their lengths follow the quantiles, their number of
    turns is geometric, pauses are exponential, and rules are the same ones at every turn.
    """
    planned, draw = plan.traffic, np.random.default_rng(plan.seed)
    counted_from_s = 0.0
    if planned.turns > 1:  # in the steady state
        counted_from_s = WARM_UP_LENGTHS * planned.turns * planned.think_s
    until_s = counted_from_s + plan.checks / rate
    sessions = max(1, draw.poisson(until_s * rate / planned.turns))
    begins_s = np.sort(draw.uniform(0, until_s, sessions))
    quantiles = np.linspace(0, 1, len(planned.lengths))
    lengths = np.interp(draw.uniform(size=sessions), quantiles, planned.lengths)
    turns = draw.geometric(1 / planned.turns, sessions)
    arrivals: list[CheckArrival] = []
    for session in range(sessions):
        rules = _rules(planned, draw)
        due_s = float(begins_s[session])
        for turn in range(1, turns[session] + 1):
            tokens = max(1, round(float(lengths[session]) * turn / int(turns[session])))
            arrivals.append(CheckArrival(due_s, session, tokens, rules))
            due_s += float(draw.exponential(planned.think_s))
            if due_s > until_s:
                break
    arrivals.sort()
    warm_up = sum(arrival.due_s < counted_from_s for arrival in arrivals)
    return DrawnTraffic(arrivals, warm_up)


def _rules(planned: PlannedTraffic, draw: np.random.Generator) -> tuple[int, ...]:
    """Different rules, drawn by their popularity: the largest of log weight plus Gumbel noise."""
    least, most = planned.rules_a_check
    count = int(draw.integers(least, most + 1))
    if count == planned.rules:
        return tuple(range(count))
    keys = draw.gumbel(size=planned.rules) - planned.zipf * np.log(np.arange(1, planned.rules + 1))
    return tuple(int(rule) for rule in np.argpartition(-keys, count)[:count])
