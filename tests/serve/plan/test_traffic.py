from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from serve.plan.traffic import TrafficShape, draw_traffic

ONE_TURN = TrafficShape(lengths=(100, 200, 400), rules_a_check=(2, 6), rules=20)
TURNS = TrafficShape((100, 400), (1, 3), 10, zipf=1.0, turns=4, think_s=5.0)


def test_conversations_of_one_turn_come_at_the_rate_with_the_lengths() -> None:
    drawn = draw_traffic(ONE_TURN, rate=20.0, checks=4000, seed=1)
    arrivals = drawn.arrivals
    assert drawn.warm_up == 0 and len(arrivals) == pytest.approx(4000, rel=0.05)
    assert arrivals[-1].due_s == pytest.approx(200, rel=0.02)
    gaps = np.diff([arrival.due_s for arrival in arrivals])
    assert gaps.min() >= 0 and gaps.std() == pytest.approx(gaps.mean(), rel=0.1), "exponential"
    tokens = [arrival.tokens for arrival in arrivals]
    assert np.median(tokens) == pytest.approx(200, rel=0.1)
    assert min(tokens) >= 100 and max(tokens) <= 400
    assert {len(arrival.rules) for arrival in arrivals} == {2, 3, 4, 5, 6}
    assert all(len(set(arrival.rules)) == len(arrival.rules) for arrival in arrivals)


def test_lengths_between_two_quantiles_are_drawn_evenly() -> None:
    arrivals = draw_traffic(ONE_TURN, rate=20.0, checks=4000, seed=1).arrivals
    drawn = np.mean([arrival.tokens for arrival in arrivals])
    assert drawn == pytest.approx((150 + 300) / 2, rel=0.02)


def test_the_same_seed_draws_the_same_and_another_others() -> None:
    first, again, other = (draw_traffic(TURNS, 5.0, 200, seed) for seed in (1, 1, 2))
    assert first == again != other


def test_conversations_grow_from_turn_to_turn_and_keep_their_rules() -> None:
    drawn = draw_traffic(TURNS, rate=20.0, checks=4000, seed=3)
    counted = len(drawn.arrivals) - drawn.warm_up
    assert counted == pytest.approx(4000, rel=0.1)
    by_session = defaultdict(list)
    for arrival in drawn.arrivals:
        by_session[arrival.session].append(arrival)
    for turns in by_session.values():
        assert [turn.tokens for turn in turns] == sorted(turn.tokens for turn in turns)
        assert len({turn.rules for turn in turns}) == 1
    begun_early = [turns for turns in by_session.values() if turns[0].due_s < 60]
    assert np.mean([len(turns) for turns in begun_early]) == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize("zipf", [0.0, 1.5])
def test_popular_rules_are_asked_more_by_zipfs_law(zipf: float) -> None:
    shape = TrafficShape((100, 200), (1, 1), 50, zipf=zipf)
    drawn = draw_traffic(shape, 100.0, 20_000, seed=4)
    counts = Counter(arrival.rules[0] for arrival in drawn.arrivals)
    assert counts[0] / counts[3] == pytest.approx(4**zipf, rel=0.15)


@pytest.mark.parametrize("turns", [1.5, 2.0, 4.0, 12.0])
def test_99_percent_of_the_conversations_end_within_the_warm_up(turns: float) -> None:
    draw = np.random.default_rng(5)
    durations_s = []
    for count in draw.geometric(1 / turns, 50_000):
        durations_s.append(draw.exponential(5.0, count - 1).sum())
    shape = TrafficShape((100, 400), (1, 3), 10, turns=turns, think_s=5.0)
    assert np.mean(np.asarray(durations_s) <= shape.session_s) == pytest.approx(0.99, abs=0.002)


@pytest.mark.parametrize("turns", [1.0, 1.01])
def test_conversations_of_one_turn_need_no_warm_up(turns: float) -> None:
    assert TrafficShape((100, 400), (1, 3), 10, turns=turns).session_s == 0


def test_all_rules_are_all_rules() -> None:
    shape = TrafficShape((100, 200), (5, 5), 5)
    assert draw_traffic(shape, 1.0, 10, seed=0).arrivals[0].rules == (0, 1, 2, 3, 4)
