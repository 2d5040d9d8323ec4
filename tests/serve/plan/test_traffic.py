"""A plan's file, and the traffic that it describes."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from guard.errors import GuardError
from serve.plan.plan_file import PLANS, PlannedTraffic, load_plan
from serve.plan.traffic import DrawnTraffic, draw_traffic
from tests.serve.plan.on_paper import plan

ONE_TURN = PlannedTraffic(lengths=(100, 200, 400), rules_a_check=(2, 6), rules=20, zipf=0.0)
ONE_RULE = PlannedTraffic(lengths=(100, 200), rules_a_check=(1, 1), rules=50)
TURNS = PlannedTraffic(lengths=(100, 400), rules_a_check=(1, 3), rules=10, turns=4.0, think_s=5.0)


def draw(planned: PlannedTraffic, rate: float, checks: int, seed: int) -> DrawnTraffic:
    update = {"traffic": planned, "checks": checks, "seed": seed}
    return draw_traffic(plan().model_copy(update=update), rate)


def test_conversations_of_one_turn_come_at_the_rate_with_the_lengths() -> None:
    drawn = draw(ONE_TURN, rate=20.0, checks=4000, seed=1)
    arrivals = drawn.arrivals
    assert drawn.warm_up == 0 and len(arrivals) == pytest.approx(4000, rel=0.05)
    assert arrivals[-1].due_s == pytest.approx(200, rel=0.02)
    gaps = np.diff([arrival.due_s for arrival in arrivals])
    assert gaps.min() >= 0 and gaps.std() == pytest.approx(gaps.mean(), rel=0.1), "exponential"
    tokens = [arrival.tokens for arrival in arrivals]
    assert np.median(tokens) == pytest.approx(200, rel=0.1)
    assert np.mean(tokens) == pytest.approx((150 + 300) / 2, rel=0.02), "evenly between quantiles"
    assert min(tokens) >= 100 and max(tokens) <= 400
    assert {len(arrival.rules) for arrival in arrivals} == {2, 3, 4, 5, 6}
    assert all(len(set(arrival.rules)) == len(arrival.rules) for arrival in arrivals)
    again, another = (draw(ONE_TURN, 20.0, 4000, seed) for seed in (1, 2))
    assert again == drawn != another


def test_conversations_grow_from_turn_to_turn_and_keep_their_rules() -> None:
    drawn = draw(TURNS, rate=20.0, checks=4000, seed=3)
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
    traffic = ONE_RULE.model_copy(update={"zipf": zipf})
    counts = Counter(check.rules[0] for check in draw(traffic, 100.0, 20_000, 4).arrivals)
    assert counts[0] / counts[3] == pytest.approx(4**zipf, rel=0.15)
    every_rule = traffic.model_copy(update={"rules_a_check": (50, 50)})
    assert draw(every_rule, 1.0, 10, 0).arrivals[0].rules == tuple(range(50))


def test_every_plan_loads_and_a_file_of_one_s_own(tmp_path: Path) -> None:
    for path in PLANS.glob("*.yaml"):
        assert load_plan(path.stem).name == path.stem
    (tmp_path / "mine.yaml").write_text("name: mine\nseed: 3\n", encoding="utf-8")
    assert load_plan(str(tmp_path / "mine.yaml")).seed == 3


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ("traffic: {rate: 0.0}", "'traffic.rate'.*greater than 0.*got 0"),
        ("traffic: {rules_a_check: [5, 2]}", "least and most, of the 100 rules"),
        ("traffic: {lengths: [300, 100]}", "quantiles.*rising"),
        ("traffic: {turns: 0.5}", "'traffic.turns'"),
        ("checks: 10000000", "'checks'"),
        ("seed: -1", "'seed'.*greater than or equal to 0, got -1"),
        ("traffic: {rate: 1.0e+999}", "'traffic.rate'.*finite number"),
        ("traffic: {zipf: .nan}", "'traffic.zipf'"),
        ("trafic: {rate: 1.0}", "unknown key 'trafic'. Did you mean 'traffic'"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path: Path, stated: str, words: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"name: mine\n{stated}\n", encoding="utf-8")
    with pytest.raises(GuardError, match=words):
        load_plan(str(tmp_path / "mine.yaml"))
