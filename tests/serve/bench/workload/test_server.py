"""What benchmarks put on a server, and the clock beside it: prompts, arrivals, open-loop load."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from pytest import MonkeyPatch

from guard.errors import GuardError
from serve.api.app import create_app
from serve.bench.workload.prompts import conversation, wordings
from serve.bench.workload.server import HttpRun, SentCheck, as_body, send, steady_rate
from serve.bench.workload.traffic import LENGTHS, RULES, arrivals, open_loop, zipf
from tests.serve.cards import RULE_TEXTS, prompts
from tests.serve.guarded import CONVERSATION
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine

BODY = as_body(CONVERSATION, ["fine"])


def test_checks_are_sent_when_they_are_due_and_no_more_are_under_way_than_may_be() -> None:
    engine = ToyEngine({"fine": -2.0})
    engine.on_step = lambda: time.sleep(0.02)
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        assert send(str(client.base_url), [BODY] * 3, [0.0, 0.1, 0.3], 5.0).wall_s >= 0.3
        run = send(str(client.base_url), [BODY] * 9, [0.0] * 9, 5.0, at_once=3)
    assert run.count(200) == len(run.answered_s) == 9
    assert all(0 < latency < run.wall_s for latency in run.answered_s)
    began_s = [check.latency_s - check.waited_s for check in run.sent]
    under_way: list[int] = []
    for moment_s in began_s:
        spans = zip(began_s, run.answered_s, strict=True)
        under_way.append(sum(since_s <= moment_s < until_s for since_s, until_s in spans))
    assert max(under_way) == 3


@pytest.mark.slow
def test_what_the_server_sheds_is_counted(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("serve.engine.thread.engine_thread.MAX_QUEUED", 1)
    monkeypatch.setattr("serve.engine.thread.engine_thread.MAX_OPEN", 1)
    engine = ToyEngine({"fine": -2.0})
    engine.on_step = lambda: time.sleep(0.2)
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        run = send(str(client.base_url), [BODY] * 8, [0.01 * n for n in range(8)], 5.0)
    assert run.count(503) > 0 and run.count(503) + run.count(200) == 8
    assert len(run.answered_s) == run.count(200) > 0


def test_the_rate_is_that_of_the_middle_where_as_many_checks_are_under_way_all_the_time() -> None:
    slow_start, steady = [9.0, 9.5, 10.0], [10.0 + 0.1 * number for number in range(1, 7)]
    assert steady_rate([*slow_start, *steady, 13.0, 18.0, 20.0][::-1]) == pytest.approx(10)
    with pytest.raises(GuardError, match="hardly any check was answered"):
        steady_rate([1.0, 2.0, 3.0])


def test_only_answers_count_as_late_and_from_when_they_were_sent() -> None:
    statuses = [(200, 0.1), (200, 5.02), (200, 7.0), (503, 9.0), (0, 1.0), (500, 9.0)]
    sent = tuple(SentCheck(status, latency_s, latency_s - 0.05) for status, latency_s in statuses)
    run = HttpRun(sent, wall_s=4.0)
    assert (run.count(200), run.count(503), run.late(5.0)) == (3, 1, 1)
    assert run.answered_s == [0.1, 5.02, 7.0]


@dataclass
class Answered:
    done: bool = True


def test_requests_that_wait_for_a_slow_server_count_their_waiting() -> None:

    def submit(_: int) -> Answered:
        time.sleep(0.02)
        return Answered()

    assert open_loop(submit, lambda: None, [0.0, 0.001]).latencies_s[1] >= 0.035


@pytest.mark.parametrize("alpha", [0.5, 1.2])
def test_zipf_s_law_is_followed(alpha: float) -> None:
    drawn = Counter(zipf(50, alpha, 200_000, seed=1))
    assert drawn[0] / drawn[9] == pytest.approx(10**alpha, rel=0.1)
    few = [zipf(50, alpha, 100, seed) for seed in (1, 1, 2)]
    assert few[0] == few[1] != few[2]


def test_conversations_have_real_lengths_and_a_few_rules_each() -> None:
    drawn = arrivals(prompts(), 5.0, 200, seed=3)
    lengths = sorted(len(prompts().prefix_ids(arrival.messages)) for arrival in drawn)
    assert lengths[0] >= LENGTHS[0] - 5 and lengths[-1] <= LENGTHS[-1] + 5
    assert np.median(lengths) == pytest.approx(LENGTHS[10], rel=0.1)
    assert {len(arrival.rules) for arrival in drawn} == set(range(RULES[0], RULES[1] + 1))
    assert all(len(set(arrival.rules)) == len(arrival.rules) for arrival in drawn)
    assert drawn[-1].due_s == pytest.approx(40, rel=0.3)
    assert drawn == arrivals(prompts(), 5.0, 200, seed=3)
    others = arrivals(prompts(), 5.0, 200, seed=4)
    assert not {arrival.messages for arrival in drawn} & {arrival.messages for arrival in others}


def test_a_conversation_has_the_length_that_was_asked_for_and_new_words() -> None:
    for tokens in (60, 100, 250, 1000):
        made = prompts().prefix_ids(conversation(prompts(), tokens, seed=1))
        assert abs(len(made) - tokens) <= 5
    first, second = (prompts().prefix_ids(conversation(prompts(), 500, seed)) for seed in (1, 2))
    end = len(prompts().prefix_ids([])) + 32  # a block
    assert first[:end] != second[:end]  # they share nothing but the head
    with pytest.raises(GuardError, match="length"):
        conversation(prompts(), 20, seed=1)


def test_as_many_distinct_wordings_as_rules_each_of_a_rule_s_length() -> None:
    texts = list(RULE_TEXTS.values())
    worded = wordings(texts, 100)
    assert len(set(worded)) == 100 and worded[: len(texts)] == texts
    lengths = {tuple(sorted(text.split())) for text in worded}
    assert lengths == {tuple(sorted(text.split())) for text in texts}
    assert wordings(texts, 2) == texts[:2]
    assert wordings([""], 3) == ["", "", ""]  # an adapter that reads nothing
    with pytest.raises(GuardError, match="too short for so many wordings"):
        wordings(["two words"], 3)
