from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from serve.plan.routing.turns import ConversationTurn, draw_turns
from serve.plan.traffic.generate import TrafficShape

SHAPE = TrafficShape((100, 400), (2, 4), 10, turns=4.0, think_s=2.0)


def test_turns_come_in_order_at_the_rate_and_grow() -> None:
    arrivals = draw_turns(SHAPE, conversations_per_second=50.0, seconds=100.0, seed=1)
    turns = arrivals.listed()
    assert len(turns) == len(arrivals)
    assert all(np.diff(arrivals.due_s) >= 0)
    counted = [turn for turn in turns if turn.due_s >= arrivals.counted_from_s]
    assert len(counted) / 100 == pytest.approx(4 * 50, rel=0.1)
    by_session: dict[int, list[ConversationTurn]] = defaultdict(list)
    for turn in turns:
        by_session[turn.session].append(turn)
    for conversation in by_session.values():
        earlier = 0
        for turn in conversation:
            assert turn.earlier_tokens == pytest.approx(earlier, abs=1)
            assert turn.tokens >= earlier and 2 <= turn.rules <= 4
            earlier = turn.tokens


def test_long_conversations_too_come_at_the_full_rate_once_they_are_counted() -> None:
    shape = TrafficShape((100, 400), (2, 4), 10, turns=12.0, think_s=2.0)
    arrivals = draw_turns(shape, conversations_per_second=500.0, seconds=20.0, seed=1)
    counted = int((arrivals.due_s >= arrivals.counted_from_s).sum())
    assert counted / 20 == pytest.approx(12 * 500, rel=0.05)


def test_one_percent_of_the_full_rate_is_missing_where_counting_begins() -> None:
    shape = TrafficShape((100, 400), (2, 4), 10, turns=2.0, think_s=2.0)
    arrivals = draw_turns(shape, conversations_per_second=50_000.0, seconds=0.5, seed=1)
    counted = int((arrivals.due_s >= arrivals.counted_from_s).sum())
    assert counted / 0.5 == pytest.approx(0.99 * 2 * 50_000, rel=0.01)


def test_conversations_have_so_many_turns_on_average() -> None:
    arrivals = draw_turns(SHAPE, 50.0, 200.0, seed=2)
    first = arrivals.listed()
    sessions = {turn.session for turn in first if turn.due_s < 100}
    count = sum(turn.session in sessions for turn in first)
    assert count / len(sessions) == pytest.approx(4, rel=0.15)
