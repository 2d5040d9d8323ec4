"""Every turn's verdicts, what is new since a turn, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from httpx import Client

from guard.conversation.example import Message
from serve.api.input.limits import MAX_TURNS
from serve.policy.logic import parse
from serve.policy.rule_set import RuleSet
from tests.serve.api.observe.toy_record import Records
from tests.serve.client.censor import Censor
from tests.serve.serving import Serve

TURNS = ["hello", "good day", "now the forbidden", "word", "goodbye"]


def messages(*contents: str) -> list[dict[str, str]]:
    turns: list[dict[str, str]] = []
    for number, content in enumerate(contents):
        turns.append({"role": ("user", "assistant")[number % 2], "content": content})
    return turns


def asked(client: Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/check/turns", json={"messages": messages(*TURNS)} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_every_turn_has_a_verdict_and_the_first_that_violates_is_named(censored: Client) -> None:
    answer = asked(censored)
    assert [turn["turn"] for turn in answer["turns"]] == [0, 1, 2, 3, 4]
    assert [turn["verdict"] for turn in answer["turns"]] == ["allow"] * 2 + ["violation"] * 3
    assert [turn["violated"] for turn in answer["turns"]][1:3] == [[], ["words"]]
    assert answer["turns"][2]["p_violation"]["words"] > 0.9
    assert answer["first_violation"] == {"words": 2}
    assert answer["verdict"] == "violation" and answer["decided_by"] == ["words"]
    assert answer["judged_alone"] == {} and answer["rule_set"] is None
    for body, why in (
        ({"since": 5}, "there are 5 messages"),
        ({"messages": messages(*["a"] * (MAX_TURNS + 1))}, "raise `since`"),
    ):
        sent = {"messages": messages(*TURNS)} | body
        response = censored.post("/v1/check/turns", json=sent)
        assert response.status_code == 422 and why in response.text


def test_an_old_violation_does_not_block_what_is_new(censored: Client, censor: Censor) -> None:
    tools = [{"type": "function", "function": {"name": "pay"}}]  # which are no turn
    answer = asked(censored, since=3, tools=tools)
    assert [turn["turn"] for turn in answer["turns"]] == [3, 4]
    assert list(answer["judged_alone"]) == ["words"] and answer["first_violation"] == {}
    assert answer["judged_alone"]["words"] < 0.25
    assert answer["verdict"] == "allow"
    # Of the rule that was violated before, what is new was read by itself.
    described, *read = censor.conversations[-1]
    assert described == Message("system", 'Tools:\n{"name": "pay"}')
    assert [message.content for message in read] == TURNS[3:]


def test_a_new_violation_counts_whatever_was_before(censored: Client, censor: Censor) -> None:
    assert asked(censored, since=2)["verdict"] == "violation"
    again = messages(*TURNS, "forbidden again")
    answer = asked(censored, messages=again, since=4)
    assert answer["verdict"] == "violation" and answer["judged_alone"]["words"] > 0.9
    assert answer["decided_by"] == ["words"]
    # Each new turn is judged: a rule on the last turn alone is not satisfied by a later one.
    said = messages("forbidden", "hello", "forbidden", "hello")
    assert asked(censored, messages=said, since=1)["judged_alone"]["words"] > 0.9
    alone = [[one.content for one in read] for read in censor.conversations[-3:]]
    assert alone == [["hello"], ["hello", "forbidden"], ["hello", "forbidden", "hello"]]


def test_a_turn_that_could_not_be_judged_or_says_nothing_is_no_allow(censored: Client) -> None:
    answer = asked(censored, messages=messages("hello", "cannot be judged"))
    assert [turn["verdict"] for turn in answer["turns"]] == ["allow", "unjudged"]
    assert answer["verdict"] == "unjudged"
    assert {rule["rule"] for rule in answer["turns"][1]["unjudged"]} == {"words", "fine"}
    silent = asked(censored, messages=messages("", "", "hello"), rules=["fine"])["turns"]
    assert [turn["verdict"] for turn in silent] == ["unjudged", "unjudged", "allow"]
    assert silent[0]["unjudged"][0]["code"] == "nothing_said"


def test_a_turn_that_violates_by_itself_is_a_violation_whatever_excused_another(
    serve: Serve, censor: Censor
) -> None:
    unless = RuleSet(("words", "fine"), parse({"rule": "words", "unless": "fine"}, "here"), "set")
    client = serve(censor, rule_sets={"set": unless})

    def excuse_all_turns_but_the_last() -> None:
        is_last = len(censor.conversations[-1]) == len(TURNS)
        censor.logits = {"words": -5.0, "fine": -5.0 if is_last else 5.0}

    censor.on_step = excuse_all_turns_but_the_last
    answer = asked(client, rule_set="set")
    assert [turn["verdict"] for turn in answer["turns"]] == ["allow"] * 4 + ["violation"]
    assert answer["verdict"] == "violation"


@pytest.mark.parametrize(
    ("contents", "since", "turns"),
    [
        (["hello", "forbidden", "breaks", "bye"], 0, [0, 1]),
        (["forbidden", "hello", "forbidden", "breaks"], 1, [1, 2]),
        (["hello", "breaks", "forbidden"], 0, None),
        (["forbidden", "hello", "breaks"], 1, None),  # the violation is an old one
        (["forbidden", "breaks", "forbidden"], 2, None),
    ],
)
def test_a_violation_that_is_known_is_answered_though_a_later_check_fails(
    censored: Client, contents: list[str], since: int, turns: list[int] | None
) -> None:
    body = {"messages": messages(*contents), "since": since}
    response = censored.post("/v1/check/turns", json=body)
    answer = response.json()
    if turns is None:
        assert (response.status_code, answer["verdict"]) == (503, "unjudged")
        return
    assert answer["verdict"] == "violation" and answer["decided_by"] == ["words"]
    assert [turn["turn"] for turn in answer["turns"]] == turns
    assert list(answer["judged_alone"]) == ["words"] * bool(since)


def test_checks_that_tell_what_is_new_are_not_counted(serve: Serve, censor: Censor) -> None:
    records = Records()
    strict = replace(RuleSet.any_of(("words", "fine")), name="strict")
    client = serve(censor, rule_sets={"strict": strict}, observers=[records])
    asked(client, since=3, rule_set="strict")
    purposes = [record.purpose for record in records.kept]
    assert purposes == ["since", *["answer"] * 2, *["since"] * 2]
    assert {record.rule_set.name for record in records.kept} == {"strict"}
    counted = client.get("/metrics").text
    total = 'guard_checks_total{rule_set="strict",tenant="",verdict="violation"} 2.0'
    assert total in counted and 'guard_verdicts_total{rule="fine",verdict="allow"} 2.0' in counted
