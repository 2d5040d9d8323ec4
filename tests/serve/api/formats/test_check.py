"""Our own wire format over HTTP: the engine's verdicts, never an "allow" without one, and the turn
that carries a violation.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from httpx import Client

from guard.conversation.example import Message
from serve.api.app import create_app
from serve.api.input.limits import MAX_CHARACTERS, MAX_MESSAGES, MAX_RULES, MAX_TURNS
from tests.serve.api.observe.toy_record import Records
from tests.serve.cards import RULE_TEXTS
from tests.serve.client.censor import Censor
from tests.serve.guarded import CONVERSATION, guard_engine
from tests.serve.serving import MESSAGES, Serve, serving
from tests.serve.toy_engine import RULE_SETS, ToyEngine


@pytest.mark.slow
def test_a_check_over_http_is_the_engine_s() -> None:
    with serving(create_app(guard_engine())) as client:
        answer = client.post("/v1/check", json=asked(rules=["pii_leak", "plain"])).json()
        every_rule = client.post("/v1/check", json=asked()).json()
        listed = client.get("/v1/rules").json()
    direct = guard_engine().check(CONVERSATION, ["pii_leak", "plain"])
    assert [result["rule"] for result in answer["results"]] == ["pii_leak", "plain"]
    for result, verdict in zip(answer["results"], direct.verdicts, strict=True):
        assert result["p_violation"] == pytest.approx(verdict.p_violation, abs=1e-4)
        assert result["threshold"] == 0.25
        assert result["verdict"] == ("violation" if verdict.violates else "allow")
    assert answer["verdict"] == direct.outcome
    violated = [verdict.rule for verdict in direct.verdicts if verdict.violates]
    assert answer["decided_by"] == violated or answer["verdict"] != "violation"
    assert "rule_set" not in answer
    assert answer["unjudged"] == [] and answer["latency_ms"] > 0
    assert answer["usage"]["computed_tokens"] > 0
    assert [result["rule"] for result in every_rule["results"]] == list(RULE_TEXTS)
    assert {rule["rule"]: rule["text"] for rule in listed} == RULE_TEXTS
    assert {rule["threshold"] for rule in listed} == {0.25}


def said(content: object, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content} | fields]}


def asked(**fields: object) -> dict[str, object]:
    return {"messages": MESSAGES} | fields


MALFORMED: dict[str, dict[str, object]] = {
    "messages.0.role": said("hi", role="root"),
    "no message has any text": said(" "),
    "messages.0: nmae: no rule would read what it says": said("hi", nmae="x"),
    "rules: not served: fone, x; Did you mean 'fine'? GET /v1/rules lists them": asked(
        rules=["fone", "x"]
    ),
    "rules: one of them stands there twice": asked(rules=["fine", "fine"]),
    "a rule set or rules, not both": asked(rules=["fine"], rule_set="both"),
    "metadata are for the conditions": asked(metadata={"channel": "email"}),
    "metadata: at most 32 keys": asked(
        rule_set="both", metadata={str(key): 1 for key in range(1_000)}
    ),
    "rule_set: there is no 'x'": asked(rule_set="x"),
    "threshold: there is no such key": asked(threshold=0.1),
    "messages: List should have at most 10000 items": {
        "messages": MESSAGES[:1] * (MAX_MESSAGES + 1)
    },
    "rules: List should have at most 1000 items": asked(rules=["x"] * (MAX_RULES + 1)),
    "the limit is": said("x" * (MAX_CHARACTERS + 1)),
    "can be explained": {"messages": MESSAGES[:1] * (MAX_TURNS + 1), "explain": True},
}


@pytest.mark.parametrize("error", MALFORMED)
def test_a_malformed_request_is_told_what_is_wrong(client: Client, error: str) -> None:
    response = client.post("/v1/check", json=MALFORMED[error])
    answer = response.json()
    assert (response.status_code, answer["code"]) == (422, "request_refused")
    assert error in answer["error"] and answer["verdict"] == "unjudged"


def test_a_rule_set_is_its_logic_and_never_an_allow_without_verdicts(client: Client) -> None:
    listed = {entry["rule_set"]: entry["rules"] for entry in client.get("/v1/rule_sets").json()}
    assert listed == {name: list(rule_set.rules) for name, rule_set in RULE_SETS.items()}
    unjudged = said("cannot be judged")
    for body, verdict, decided_by in (
        (asked(rule_set="both"), "allow", ["fine"]),
        (asked(rule_set="staff"), "unjudged", ["metadata.audience"]),
        (asked(rule_set="staff", metadata={"audience": "staff"}), "allow", ["metadata.audience"]),
        (unjudged | {"rule_set": "both"}, "unjudged", ["flagged", "fine"]),
    ):
        answer = client.post("/v1/check", json=body).json()
        assert (answer["verdict"], answer["decided_by"]) == (verdict, decided_by)
        judged = [rule["rule"] for rule in (*answer["results"], *answer["unjudged"])]
        assert judged == listed[answer["rule_set"]]


def test_tools_are_judged_before_the_messages_and_a_salt_parts_them(serve: Serve) -> None:
    engine = ToyEngine({"fine": -2.0})
    pay = {"name": "pay", "description": "Pays."}
    beside = {"tools": [{"type": "function", "function": pay}], "cache_salt": "tenant 7"}
    response = serve(engine).post("/v1/check", json=asked(**beside))
    assert response.json()["verdict"] == "allow", response.text
    described = Message("system", 'Tools:\n{"name": "pay", "description": "Pays."}')
    assert engine.conversations == [(described, *CONVERSATION)]
    assert engine.salts == ["tenant 7"]


def explained(client: Client, *contents: object, guard_timeout_ms: str = "60000") -> dict[str, Any]:
    messages = [{"role": "user", "content": content} for content in contents]
    headers = {"guard-timeout-ms": guard_timeout_ms}
    body = {"messages": messages, "explain": True}
    response = client.post("/v1/check", json=body, headers=headers)
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("turn", [0, 1, 4])
def test_a_violated_rule_names_its_turn_and_no_other_rule_does(censored: Client, turn: int) -> None:
    contents = ["hello"] * 5
    contents[turn] = "forbidden"
    answer = explained(censored, *contents)
    assert answer["verdict"] == "violation"
    (explanation,) = answer["explanations"].values()
    assert answer["explanations"].keys() == {"words"} and explanation["turn"] == turn
    assert explanation["p_after"] > 0.9
    assert ("p_before" in explanation) == (turn > 0)
    assert explanation.get("p_before", 0.0) < 0.1


def test_only_violated_rules_are_asked_again_and_that_is_no_answer(serve: Serve) -> None:
    records = Records()
    client = serve(Censor(), observers=[records])
    assert explained(client, "hello", "good day")["explanations"] == {}
    explained(client, "hello", "forbidden", "hello")
    answer = client.post("/v1/check", json=said("forbidden")).json()
    assert answer["verdict"] == "violation" and "explanations" not in answer
    purposes = [record.purpose for record in records.kept]
    assert purposes == ["answer", "answer", "explanation", "explanation", "answer"]
    metrics = client.get("/metrics").text
    assert 'guard_verdicts_total{rule="words",verdict="violation"} 2.0' in metrics
    assert 'guard_verdicts_total{rule="words",verdict="allow"} 1.0' in metrics
    assert 'guard_checks_total{rule_set="",tenant="",verdict="violation"} 2.0' in metrics


def test_a_verdict_stands_without_an_explanation(censored: Client) -> None:
    answer = explained(censored, "hello", "cannot be judged", "forbidden")
    assert answer["verdict"] == "unjudged" and answer["explanations"] == {}
    failed = explained(censored, "hello", "breaks", "forbidden")
    assert failed["verdict"] == "violation" and "explanations" not in failed
    behind_an_image = explained(censored, "hello", [{"type": "image_url"}], "forbidden")
    explanation = behind_an_image["explanations"]["words"]
    assert explanation["turn"] == 2 and explanation["p_after"] > 0.9
    assert "p_before" not in explanation


def test_explanations_that_take_too_long_leave_a_verdict(
    censored: Client, censor: Censor, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = censor.step

    def step_once() -> None:
        if len(censor.conversations) == 1:
            step()
        else:
            time.sleep(0.01)  # what explains is never answered

    monkeypatch.setattr(censor, "step", step_once)
    monkeypatch.setattr("serve.api.formats.check.EXPLAINING_SHARE", 0.1)
    answer = explained(censored, "hello", "forbidden", guard_timeout_ms="10000")
    assert answer["verdict"] == "violation" and "explanations" not in answer
    assert len(censor.conversations) == 2
