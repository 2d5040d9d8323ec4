"""The turns of many conversations, in order of time, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from serve.plan.traffic.generate import TrafficShape


class ConversationTurn(NamedTuple):
    """One turn of `TurnArrivals`."""

    due_s: float
    session: int
    tokens: int
    earlier_tokens: int
    rules: int


@dataclass(frozen=True)
class TurnArrivals:
    """Arrays with a value for each turn: its time, its conversation (a 64-bit hash), its tokens.

    `earlier_tokens`: the tokens of the turn before, 0 for a first turn. `rules`: the number of
    rules that it is put to. Turns before `counted_from_s` fill the caches.
    """

    due_s: np.ndarray
    session: np.ndarray
    tokens: np.ndarray
    earlier_tokens: np.ndarray
    rules: np.ndarray
    counted_from_s: float

    def __len__(self) -> int:
        return len(self.due_s)

    def listed(self) -> list[ConversationTurn]:
        """All turns in order, as Python's numbers, which a loop reads faster."""
        turns = zip(
            self.due_s.tolist(),
            self.session.tolist(),
            self.tokens.tolist(),
            self.earlier_tokens.tolist(),
            self.rules.tolist(),
            strict=True,
        )
        return [ConversationTurn(*turn) for turn in turns]


def draw_turns(
    shape: TrafficShape, conversations_per_second: float, seconds: float, seed: int
) -> TurnArrivals:
    """Draw conversations that begin by a Poisson process; `seconds` of them are counted.

    They are drawn as by `draw_traffic`, but with numpy, because there are millions of turns. The
    turns before the counted ones fill the caches, for as long as nearly all conversations last, so
    that the counted turns come at the full rate.
    """
    draw = np.random.default_rng(seed)
    counted_from_s = shape.session_s
    until_s = counted_from_s + seconds
    sessions = max(1, int(draw.poisson(until_s * conversations_per_second)))
    turns = draw.geometric(1 / shape.turns, sessions)
    first = np.cumsum(turns) - turns  # each conversation's first turn
    number = np.arange(turns.sum()) - np.repeat(first, turns)  # a turn's in its conversation
    pauses_s = draw.exponential(shape.think_s, turns.sum())
    pauses_s[first] = draw.uniform(0, until_s, sessions)
    total_s = np.cumsum(pauses_s)
    due_s = total_s - np.repeat(total_s[first] - pauses_s[first], turns)
    quantiles = np.linspace(0, 1, len(shape.lengths))
    lengths = np.repeat(np.interp(draw.uniform(size=sessions), quantiles, shape.lengths), turns)
    turn_count = np.repeat(turns, turns)  # in the turn's conversation
    tokens = np.maximum(1, np.rint(lengths * (number + 1) / turn_count)).astype(int)
    earlier = np.where(number > 0, np.rint(lengths * number / turn_count), 0).astype(int)
    least, most = shape.rules_a_check
    rules = np.repeat(draw.integers(least, most + 1, sessions), turns)
    hashes = draw.integers(0, 2**64, sessions, dtype=np.uint64)
    session = np.repeat(hashes, turns)
    order = np.argsort(due_s, kind="stable")
    order = order[due_s[order] < until_s]
    return TurnArrivals(
        due_s[order],
        session[order],
        tokens[order],
        earlier[order],
        rules[order],
        counted_from_s,
    )
