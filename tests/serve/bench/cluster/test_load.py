from __future__ import annotations

from typing import Any

import httpx

from serve.bench.cluster.load import LoadOutcomes, UndisturbedCheck

UNDISTURBED = UndisturbedCheck(
    {}, "violation", {"a": (0.9, 0.5), "b": (0.2, 0.5), "near": (0.51, 0.5)}
)


def response(status: int, verdict: str, **rules: str) -> httpx.Response:
    results = [{"rule": rule, "verdict": word} for rule, word in rules.items()]
    content: dict[str, Any] = {"verdict": verdict, "results": results}
    return httpx.Response(status, json=content)


def test_every_answer_is_judged_unjudged_or_lost_and_an_allow_may_be_false() -> None:
    outcomes = LoadOutcomes()
    outcomes.note(
        UNDISTURBED, response(200, "violation", a="violation", b="allow", near="allow"), 0.1
    )
    outcomes.note(UNDISTURBED, response(200, "violation", a="violation", b="violation"), 0.1)
    outcomes.note(UNDISTURBED, response(200, "allow", a="allow", b="allow", near="allow"), 0.1)
    outcomes.note(UNDISTURBED, response(503, "unjudged"), 0.1)
    outcomes.note(UNDISTURBED, response(500, "unjudged"), 0.1)
    outcomes.note(UNDISTURBED, None, 0.1)
    assert (outcomes.judged, outcomes.unjudged, outcomes.lost) == (3, 1, 2)
    assert (outcomes.contradicted, outcomes.false_allows) == (2, 1)


def test_an_allow_is_false_whatever_verdicts_it_lacks() -> None:
    for rules in ({}, {"b": "allow"}, {"b": "allow", "near": "allow"}):
        outcomes = LoadOutcomes()
        outcomes.note(UNDISTURBED, response(200, "allow", **rules), 0.1)
        assert (outcomes.judged, outcomes.false_allows, outcomes.contradicted) == (1, 1, 1), rules


def test_an_answer_that_lacks_a_rule_or_has_another_one_is_contradicted() -> None:
    complete = {"a": "violation", "b": "allow", "near": "violation"}
    for rules in ({"a": "violation", "b": "allow"}, {**complete, "unknown": "allow"}):
        outcomes = LoadOutcomes()
        outcomes.note(UNDISTURBED, response(200, "violation", **rules), 0.1)
        assert (outcomes.contradicted, outcomes.false_allows) == (1, 0), rules


def test_a_complete_answer_is_not_contradicted_nor_one_that_says_which_rule_it_lacks() -> None:
    outcomes = LoadOutcomes()
    complete = response(200, "violation", a="violation", b="allow", near="violation")
    outcomes.note(UNDISTURBED, complete, 0.1)
    content = response(200, "violation", a="violation", near="violation").json()
    content["unjudged"] = [{"rule": "b", "reason": "too late"}]
    outcomes.note(UNDISTURBED, httpx.Response(200, json=content), 0.1)
    assert (outcomes.judged, outcomes.contradicted, outcomes.false_allows) == (2, 0, 0)


def test_what_is_no_answer_to_a_check_is_lost_whatever_its_body() -> None:
    outcomes = LoadOutcomes()
    for status in (500, 503, 200):
        outcomes.note(UNDISTURBED, httpx.Response(status, text="Internal Server Error"), 0.1)
    outcomes.note(UNDISTURBED, httpx.Response(503, json={"error": "busy"}), 0.1)
    assert (outcomes.judged, outcomes.unjudged, outcomes.lost) == (0, 0, 4)


def test_a_verdict_near_its_threshold_may_differ_and_no_other() -> None:
    near = UndisturbedCheck({}, "violation", {"near": (0.51, 0.5)})
    outcomes = LoadOutcomes()
    outcomes.note(near, response(200, "allow", near="allow"), 0.1)
    assert (outcomes.contradicted, outcomes.false_allows) == (0, 0)


def test_a_conversation_that_comes_to_another_replica_has_moved() -> None:
    outcomes = LoadOutcomes()
    for replica in ("one", "one", "two", "two", "one"):
        answer = response(200, "violation", a="violation")
        answer.headers["x-guard-replica"] = replica
        outcomes.note(UNDISTURBED, answer, 0.1)
    assert (outcomes.judged, outcomes.moved) == (5, 2)
