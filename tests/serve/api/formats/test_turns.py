"""Every turn's verdicts, what is new since a turn, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
from httpx import Client

from guard.conversation.example import Message
from serve.api.app import create_app
from serve.api.formats.turns import _together
from serve.api.input.limits import MAX_TURNS
from serve.policy.logic import parse
from serve.policy.rule_set import RuleSet
from serve.policy.ruling import Ruling
from tests.serve.api.observe.toy_record import Records
from tests.serve.cards import RULE_TEXTS, prompts
from tests.serve.client.censor import Censor
from tests.serve.guarded import guard_engine
from tests.serve.serving import Serve, serving

pytestmark = pytest.mark.slow

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


def test_an_old_violation_does_not_block_what_is_new(censored: Client, censor: Censor) -> None:
    answer = asked(censored, since=3)
    assert [turn["turn"] for turn in answer["turns"]] == [3, 4]
    assert list(answer["judged_alone"]) == ["words"] and answer["first_violation"] == {}
    assert answer["judged_alone"]["words"] < 0.25
    assert answer["verdict"] == "allow"
    # Of the rule that was violated before, what is new was read by itself.
    assert [message.content for message in censor.conversations[-1]] == TURNS[3:]


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


def test_a_turn_that_violates_by_itself_is_a_violation_whatever_excused_another() -> None:
    rules = ("words", "fine")
    unless = RuleSet(rules, parse({"rule": "words", "unless": "fine"}, "here"), "strict")
    turn = {"words": Ruling.VIOLATION, "fine": Ruling.VIOLATION}
    later = {"words": Ruling.VIOLATION, "fine": Ruling.ALLOW}
    decisions = [unless.decide(rulings, {}) for rulings in (turn, later)]
    assert [decision.ruling for decision in decisions] == [Ruling.ALLOW, Ruling.VIOLATION]
    assert _together(decisions) is decisions[1]
    assert _together(decisions[:1]).ruling is Ruling.ALLOW


def test_a_turn_that_could_not_be_judged_or_says_nothing_is_no_allow(censored: Client) -> None:
    answer = asked(censored, messages=messages("hello", "cannot be judged"))
    assert [turn["verdict"] for turn in answer["turns"]] == ["allow", "unjudged"]
    assert answer["verdict"] == "unjudged"
    assert {rule["rule"] for rule in answer["turns"][1]["unjudged"]} == {"words", "fine"}
    silent = asked(censored, messages=messages("", "", "hello"), rules=["fine"])["turns"]
    assert [turn["verdict"] for turn in silent] == ["unjudged", "unjudged", "allow"]
    assert silent[0]["unjudged"] == [
        {"rule": "fine", "code": "nothing_said", "reason": "there is no text to judge"}
    ]


@pytest.mark.parametrize(
    ("contents", "since", "turns", "judged_alone"),
    [
        (["hello", "forbidden", "breaks", "bye"], 0, [0, 1], []),
        (["forbidden", "hello", "forbidden", "breaks"], 1, [1, 2], ["words"]),
    ],
)
def test_a_violation_that_is_known_is_answered_though_a_later_check_fails(
    censored: Client, contents: list[str], since: int, turns: list[int], judged_alone: list[str]
) -> None:
    answer = asked(censored, messages=messages(*contents), since=since)
    assert answer["verdict"] == "violation" and answer["decided_by"] == ["words"]
    assert [turn["turn"] for turn in answer["turns"]] == turns
    assert list(answer["judged_alone"]) == judged_alone


@pytest.mark.parametrize(
    ("contents", "since"),
    [
        (["hello", "breaks", "forbidden"], 0),
        (["forbidden", "hello", "breaks"], 1),  # the violation is an old one
        (["forbidden", "breaks", "forbidden"], 2),
    ],
)
def test_a_check_that_fails_is_an_error(censored: Client, contents: list[str], since: int) -> None:
    body = {"messages": messages(*contents), "since": since}
    response = censored.post("/v1/check/turns", json=body)
    assert (response.status_code, response.json()["verdict"]) == (503, "unjudged")


def test_checks_that_tell_what_is_new_are_not_counted(serve: Serve, censor: Censor) -> None:
    records = Records()
    rules = ("words", "fine")
    strict = RuleSet(rules, RuleSet.any_of(rules).violated_if, "strict")
    client = serve(censor, rule_sets={"strict": strict}, observers=[records])
    asked(client, since=3, rule_set="strict")
    purposes = [record.purpose for record in records.kept]
    assert purposes == ["since", "answer", "answer", "since", "since"]
    assert {record.rule_set.name for record in records.kept} == {"strict"}
    counted = client.get("/metrics").text
    total = 'guard_checks_total{rule_set="strict",tenant="",verdict="violation"} 2.0'
    assert total in counted and 'guard_verdicts_total{rule="fine",verdict="allow"} 2.0' in counted


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"since": 5}, "there are 5 messages"),
        ({"since": -1}, "greater than or equal to 0"),
        ({"messages": messages(*["a"] * (MAX_TURNS + 1))}, "raise `since`"),
        ({"rules": ["nobody"]}, "not served"),
    ],
)
def test_faults_are_named(censored: Client, censor: Censor, body: dict[str, Any], why: str) -> None:
    response = censored.post("/v1/check/turns", json={"messages": messages(*TURNS)} | body)
    assert response.status_code == 422 and why in response.text
    assert response.json()["verdict"] == "unjudged" and not censor.conversations


def test_a_conversation_is_computed_once_for_all_turns_and_rules() -> None:
    """The new tokens of each turn and every rule's suffix, within 5 %, on the real engine."""
    engine = guard_engine()
    contents = [f"turn {number} has some words of its own to say here" for number in range(24)]
    rules = ["medical_advice", "pii_leak", "refund_promise"]
    with serving(create_app(engine)) as client:
        engine.forget()
        body = {"messages": messages(*contents), "rules": rules}
        answer = client.post("/v1/check/turns", json=body).json()
    turns = [Message(turn["role"], turn["content"]) for turn in messages(*contents)]  # type: ignore[arg-type]
    needed = len(prompts().prefix_ids(turns))
    for rule in rules:
        needed += len(contents) * len(prompts().suffix_ids(RULE_TEXTS[rule]))
    assert len(answer["turns"]) == len(contents)
    assert answer["usage"]["computed_tokens"] == pytest.approx(needed, rel=0.05)


def test_tools_stand_before_every_turn_and_are_no_turn(censored: Client, censor: Censor) -> None:
    tools = [{"type": "function", "function": {"name": "pay"}}]
    answer = asked(censored, messages=messages("hello", "forbidden", "bye"), tools=tools, since=2)
    assert [turn["turn"] for turn in answer["turns"]] == [2]
    described = Message("system", 'Tools:\n{"name": "pay"}')
    assert {conversation[0] for conversation in censor.conversations} == {described}
    assert [message.content for message in censor.conversations[-1][1:]] == ["bye"]
