"""A plan's file, the traffic that it describes, and traces of recorded traffic."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from guard.errors import GuardError
from guard.verdict import Verdict
from serve.api.observe.audit import AuditLog
from serve.api.observe.record import CheckRecord, RequestFacts
from serve.engine import Check
from serve.plan.plan_file import PLANS, PlannedTraffic, load_plan
from serve.plan.traffic import TrafficSource, draw_traffic, read_trace, trace_rate
from serve.policy.rule_set import RuleSet
from tests.serve.plan.on_paper import check

SUFFIX = 3
RULES = ("pii", "toxicity")


ONE_TURN = PlannedTraffic(lengths=(100, 200, 400), rules_a_check=(2, 6), rules=20, zipf=0.0)
ONE_RULE = PlannedTraffic(lengths=(100, 200), rules_a_check=(1, 1), rules=50)
TURNS = PlannedTraffic(lengths=(100, 400), rules_a_check=(1, 3), rules=10, turns=4.0, think_s=5.0)


def test_conversations_of_one_turn_come_at_the_rate_with_the_lengths() -> None:
    drawn = draw_traffic(ONE_TURN, rate=20.0, checks=4000, seed=1)
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
    again, another = (draw_traffic(ONE_TURN, 20.0, 4000, seed) for seed in (1, 2))
    assert again == drawn != another


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
    traffic = ONE_RULE.model_copy(update={"zipf": zipf})
    counts = Counter(check.rules[0] for check in draw_traffic(traffic, 100.0, 20_000, 4).arrivals)
    assert counts[0] / counts[3] == pytest.approx(4**zipf, rel=0.15)
    every_rule = traffic.model_copy(update={"rules_a_check": (50, 50)})
    assert draw_traffic(every_rule, 1.0, 10, 0).arrivals[0].rules == tuple(range(50))


def test_a_trace_is_stretched_to_the_rate() -> None:
    trace = tuple(check(due_s, 100, session=number) for number, due_s in enumerate((0, 1, 4)))
    source = TrafficSource(ONE_RULE, 10, 0, trace)
    assert trace_rate(trace) == pytest.approx(0.75)
    drawn = source.at(1.5)
    assert [arrival.due_s for arrival in drawn.arrivals] == pytest.approx([0, 0.5, 2])
    assert {arrival.due_s for arrival in source.backlog(1.5)} == {0.0}


def written(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_lines_are_read_in_order_of_time_with_rules_by_popularity(tmp_path: Path) -> None:
    path = written(
        tmp_path / "trace.jsonl",
        {"time": 112.0, "tokens": 80, "rules": ["toxicity"]},
        {"time": 100.5, "session": "a", "tokens": 50, "rules": ["pii", "toxicity"]},
        "",
        {"time": 110.0, "session": "a", "tokens": 90, "rules": ["toxicity"], "cached_tokens": 32},
    )
    trace = read_trace(path, SUFFIX)
    assert trace.rules == ("toxicity", "pii") and trace.left_out == 0
    assert [arrival.due_s for arrival in trace.arrivals] == [0.0, 9.5, 11.5]
    assert [arrival.session for arrival in trace.arrivals] == [0, 0, 1]
    assert [arrival.rules for arrival in trace.arrivals] == [(1, 0), (0,), (0,)]
    assert [arrival.cached_tokens for arrival in trace.arrivals] == [None, 32, None]
    numbers = [{"time": number, "tokens": 50, "rules": 3 - number} for number in range(2)]
    first, second = read_trace(written(tmp_path / "trace.jsonl", *numbers), SUFFIX).arrivals
    assert (first.rules, second.rules) == ((0, 1, 2), (0, 1)) and first.session != second.session


def test_an_audit_log_of_the_server_is_a_trace(tmp_path: Path) -> None:
    """Lines as the server writes them: of a conversation of 100 tokens, 64 of them in the cache."""
    verdicts = tuple(Verdict(rule, -2.0, 0.1, 0.5) for rule in RULES)
    computed = 100 - 64 + 2 * SUFFIX
    check = Check(verdicts, {}, 2 * (100 + SUFFIX) - computed, computed, 10.0)
    log = AuditLog(tmp_path / "audit.jsonl")
    for began_s, outcome, failure in (
        (1000.0, check, None),
        (1001.5, check, None),
        (1002.0, None, "too_late"),
    ):
        facts, rule_set = RequestFacts("id", "check"), RuleSet.any_of(RULES)
        log.checked(CheckRecord(facts, rule_set, {}, began_s, 0.01, outcome, None, failure))
    log.close()
    trace = read_trace(tmp_path / "audit.jsonl", SUFFIX)
    first, second = trace.arrivals
    assert trace.left_out == 1 and (first.tokens, first.cached_tokens) == (100, 64)
    assert second.due_s == pytest.approx(1.5) and len(second.rules) == 2


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], r":1: not a line of JSON"),
        (["[1]"], r":1: .*object"),
        ([{"time": 1, "tokens": 5, "rules": 1}, {"time": 1}], r":2: missing key 'tokens'"),
        ([{"request_id": "a", "rules": [{"rule": "pii"}]}], r":1: .*audit log: 'computed_tokens'"),
        ([{"time": 1, "tokens": 0, "rules": 1}], "'tokens'.*greater than or equal to 1"),
        ([{"time": 1, "tokens": 9, "rules": ["a", "a"]}], "each only once"),
        ([{"time": 1, "tokens": 9, "rules": 0}], "at least one"),
        ([{"time": 1, "tokens": 9, "rules": 1}], "at least two checks.*got 1 checks"),
        ([{"time": 1, "tokens": 9, "rules": 1}] * 2, "every check has the same timestamp"),
        ([{"time": 1, "tokens": 9, "rules": "toxic"}], r":1: 'rules.*toxic"),
        ([{"time": 1, "tokens": 9, "rules": True}], "'rules"),
        ([{"time": math.nan, "tokens": 9, "rules": 1}], r":1: 'time'.*finite number"),
        ([{"time": 1, "tokens": 9, "rules": 1, "cached_tokens": -1}], r":1: 'cached_tokens'"),
        ([{"time": 1, "tokens": 9, "rules": 1, "cached_tokens": 10}], "from 0 to tokens"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(
    tmp_path: Path, lines: list[object], words: str
) -> None:
    with pytest.raises(GuardError, match=words):
        read_trace(written(tmp_path / "trace.jsonl", *lines), SUFFIX)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes("{}".encode("utf-16"))
    with pytest.raises(GuardError, match=r"trace.jsonl: UTF-16 or UTF-32 text"):
        read_trace(path, SUFFIX)


def test_every_plan_loads() -> None:
    for path in PLANS.glob("*.yaml"):
        assert load_plan(path.stem, {}).name == path.stem


def test_a_trace_has_its_own_rate_unless_the_plan_or_an_option_beside_it_gives_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.yaml"

    def given(traffic: str, options: dict[str, Any]) -> set[str]:
        path.write_text(f"name: mine\ntraffic: {traffic}\n", encoding="utf-8")
        return load_plan(str(path), options).traffic.model_fields_set

    trace = {"traffic.trace": "checks.jsonl"}
    assert given("{trace: checks.jsonl}", {"seed": 1, "traffic.turns": 2.0}) == {"trace", "turns"}
    assert given("{trace: checks.jsonl, rate: 7}", {"seed": 1}) == {"trace", "rate"}
    assert given("{rate: 7}", trace) == {"trace"}
    assert given("{rate: 7}", trace | {"traffic.rate": 9.0}) == {"trace", "rate"}
    with pytest.raises(GuardError, match=r"missing key 'judge.output'"):
        load_plan(str(path), {"judge.input": 1.0})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"traffic.rate": 0.0}, "'traffic.rate'.*greater than 0.*got 0"),
        ({"traffic.rules_a_check": [5, 2]}, "least and most, of the 100 rules"),
        ({"traffic.lengths": [300, 100]}, "quantiles.*rising"),
        ({"traffic.turns": 0.5}, "'traffic.turns'"),
        ({"checks": 10_000_000}, "'checks'"),
        ({"seed": -1}, "'seed'.*greater than or equal to 0, got -1"),
        ({"traffic.rate": math.inf}, "'traffic.rate'.*finite number"),
        ({"traffic.zipf": math.nan}, "'traffic.zipf'"),
        ({"judge.input": math.inf}, "'judge.input'.*finite number"),
        ({"p95_ms.most": 1}, "no such section.*got p95_ms.most"),
        ({"trafic.rate": 1.0}, "unknown key 'trafic'. Did you mean 'traffic'"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(GuardError, match=words):
        load_plan("tiny_here", options)
