"""Checks that arrive, drawn from distributions. Knows nothing of what answers them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

STILL_OPEN = 0.01  # share of the conversations that do not end within `session_s`


class CheckArrival(NamedTuple):
    """One check of a replica's or a deployment's traffic.

    `due_s` counts from the beginning of the traffic. `tokens`: the length of the conversation's
    prompt so far, up to where the rules' suffixes begin. Checks of one `session` are turns of one
    conversation that grows. `cached_tokens`: how many of them the cache held, where a log says so,
    for methods that share conversations; None leaves that to the simulation.
    """

    due_s: float
    session: int
    tokens: int
    rules: tuple[int, ...]
    cached_tokens: int | None = None


@dataclass(frozen=True)
class TrafficShape:
    """The distributions that conversations are drawn from.

    `lengths`: quantiles of a whole conversation's tokens at equal steps, from the shortest to the
    longest. A conversation is checked `turns` times in the mean (geometric), each time after it has
    grown by an equal part, with pauses of `think_s` in the mean (exponential). It is put to at
    least and at most `rules_a_check` rules, the same ones at every turn. They are drawn from
    `rules` rules whose popularity falls by Zipf's law with exponent `zipf` (0: all alike).
    """

    lengths: tuple[int, ...]
    rules_a_check: tuple[int, int]
    rules: int
    zipf: float = 0.0
    turns: float = 1.0
    think_s: float = 20.0

    @property
    def session_s(self) -> float:
        """The time within which 99 % of the conversations end, in seconds.

        A share of 1 - 1 / turns of them has a second turn. These last exponentially long, turns *
        think_s in the mean, because the sum of geometrically many exponential pauses is
        exponential. So long after the first conversation began, 99 % of the turns of a steady state
        arrive.
        """
        with_several_turns = 1 - 1 / self.turns
        if with_several_turns <= STILL_OPEN:
            return 0.0
        return self.turns * self.think_s * math.log(with_several_turns / STILL_OPEN)


@dataclass(frozen=True)
class DrawnTraffic:
    """Arrivals in order; the first `warm_up` of them fill the cache and are not counted."""

    arrivals: list[CheckArrival]
    warm_up: int


def draw_traffic(shape: TrafficShape, rate: float, checks: int, seed: int) -> DrawnTraffic:
    """About `checks` checks at `rate` a second, after those that fill the cache.

    Conversations begin by a Poisson process.
    """
    draw = np.random.default_rng(seed)
    counted_from_s = shape.session_s
    until_s = counted_from_s + checks / rate
    sessions = max(1, draw.poisson(until_s * rate / shape.turns))
    begins_s = np.sort(draw.uniform(0, until_s, sessions))
    quantiles = np.linspace(0, 1, len(shape.lengths))
    lengths = np.interp(draw.uniform(size=sessions), quantiles, shape.lengths)
    turns = draw.geometric(1 / shape.turns, sessions)
    arrivals: list[CheckArrival] = []
    for session in range(sessions):
        rules = _rules(shape, draw)
        due_s = float(begins_s[session])
        for turn in range(1, turns[session] + 1):
            tokens = max(1, round(float(lengths[session]) * turn / int(turns[session])))
            arrivals.append(CheckArrival(due_s, session, tokens, rules))
            due_s += float(draw.exponential(shape.think_s))
            if due_s > until_s:
                break
    arrivals.sort()
    warm_up = sum(arrival.due_s < counted_from_s for arrival in arrivals)
    return DrawnTraffic(arrivals, warm_up)


def _rules(shape: TrafficShape, draw: np.random.Generator) -> tuple[int, ...]:
    """Different rules, drawn by their popularity: the largest of log weight plus Gumbel noise."""
    least, most = shape.rules_a_check
    count = int(draw.integers(least, most + 1))
    if count == shape.rules:
        return tuple(range(count))
    keys = draw.gumbel(size=shape.rules) - shape.zipf * np.log(np.arange(1, shape.rules + 1))
    return tuple(int(rule) for rule in np.argpartition(-keys, count)[:count])
