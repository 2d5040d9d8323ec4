"""Our own wire format over HTTP: the engine's verdicts, never an "allow" without one, and the turn
that carries a violation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx import Client

from guard.conversation.example import Message
from serve.api.app import create_app
from serve.api.input.limits import MAX_CHARACTERS, MAX_MESSAGES, MAX_RULES, MAX_TURNS
from serve.api.observe.audit import AuditLog
from serve.client import GuardClient
from serve.policy.logic import parse
from serve.policy.rule_set import RuleSet
from tests.serve.cards import RULE_TEXTS
from tests.serve.client.censor import Censor
from tests.serve.guarded import CONVERSATION, guard_engine
from tests.serve.serving import MESSAGES, Serve, serving
from tests.serve.toy_engine import ToyEngine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(create_app(guard_engine())) as client:
        yield client


def test_a_check_over_http_is_the_engine_s(client: Client) -> None:
    answer = client.post("/v1/check", json=asked(rules=["pii_leak", "plain"])).json()
    # Only one may use the engine at a time: the server has nothing to do now.
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
    every_rule = client.post("/v1/check", json={"messages": MESSAGES}).json()
    assert [result["rule"] for result in every_rule["results"]] == list(RULE_TEXTS)


def test_concurrent_checks_get_their_own_verdicts(client: Client) -> None:
    rules = list(RULE_TEXTS)
    bodies = []
    for number in range(24):
        text = f"number {number} " * (number % 7 + 1)
        bodies.append(said(text) | {"rules": rules[number % 4 :] or rules})
    alone = [client.post("/v1/check", json=body).json() for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda body: client.post("/v1/check", json=body).json(), bodies))
    for first, second in zip(alone, together, strict=True):
        expected = {rule["rule"]: rule["p_violation"] for rule in first["results"]}
        got = {rule["rule"]: rule["p_violation"] for rule in second["results"]}
        assert got == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("rules", "unknown"),
    [
        (["plain", "no_such_rule"], "no_such_rule;"),
        (["plane", "x"], "plane, x; Did you mean 'plain'?"),
    ],
)
def test_a_rule_that_is_not_served_is_named(client: Client, rules: list[str], unknown: str) -> None:
    response = client.post("/v1/check", json={"messages": MESSAGES, "rules": rules})
    assert response.status_code == 422
    error = f"rules: not served: {unknown} GET /v1/rules lists them"
    wanted = {"verdict": "unjudged", "code": "request_refused", "error": error}
    assert response.json() == wanted


def said(content: object, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content} | fields]}


def asked(**fields: object) -> dict[str, object]:
    return {"messages": MESSAGES} | fields


MALFORMED: dict[str, dict[str, object]] = {
    "messages: Field required": {},
    "messages: List should have at least 1 item": {"messages": []},
    "messages.0.role": said("hi", role="root"),
    "messages.0: content.0.x: no rule would read what it says": said(
        [{"type": "text", "text": "hi", "x": ["y"]}]
    ),
    "messages.0.content": said(5),
    "no message has any text": said(" "),
    "7 keys are unknown": asked(**{f"key_{number}": 1 for number in range(7)}),
    "messages.0: nmae: no rule would read what it says": said("hi", nmae="x"),
    "tools: Input should be a valid list": asked(tools={}),
    "rules: List should have at least 1 item": asked(rules=[]),
    "rules: a rule is named twice": asked(rules=["plain", "plain"]),
    "rules.0": asked(rules=[1]),
    "a rule set or rules, not both": asked(rules=["plain"], rule_set="x"),
    "metadata are for the conditions": asked(metadata={"channel": "email"}),
    "rule_set: there is no 'x'": asked(rule_set="x"),
    "metadata.channel: Input should be a valid string": asked(
        rule_set="x", metadata={"channel": 1}
    ),
    "threshold: there is no such key": asked(threshold=0.1),
    "cache_salt": asked(cache_salt=""),
    "messages: List should have at most 10000 items": {
        "messages": MESSAGES[:1] * (MAX_MESSAGES + 1)
    },
    "rules: List should have at most 1000 items": asked(
        rules=[str(number) for number in range(MAX_RULES + 1)]
    ),
    "the limit is": said("x" * (MAX_CHARACTERS + 1)),
}


@pytest.mark.parametrize("error", MALFORMED)
def test_a_malformed_request_is_told_what_is_wrong(client: Client, error: str) -> None:
    response = client.post("/v1/check", json=MALFORMED[error])
    assert response.status_code == 422
    assert error in response.json()["error"]
    assert response.json()["verdict"] == "unjudged"


def test_a_rule_set_is_its_logic_and_never_an_allow_without_verdicts(serve: Serve) -> None:
    logic = {
        "either": {"any_of": ["fine", "flagged"]},
        "both": {"all_of": ["fine", "flagged"]},
        "unless": {"rule": "flagged", "unless": "fine"},
        "exempt": {"rule": "flagged", "unless": {"metadata": {"channel": "email"}}},
    }
    rule_sets = {}
    for name, content in logic.items():
        expression = parse(content, name)
        rule_sets[name] = RuleSet(tuple(sorted(expression.rules)), expression, name)
    client = serve(ToyEngine({"fine": -2.0, "flagged": -1.0}), rule_sets=rule_sets)
    listed = {one["rule_set"]: one["rules"] for one in client.get("/v1/rule_sets").json()}
    assert listed == {name: list(rule_set.rules) for name, rule_set in rule_sets.items()}

    def ask(rule_set: str, **fields: Any) -> tuple[str, list[str]]:
        answer = client.post("/v1/check", json=asked(rule_set=rule_set, **fields)).json()
        assert answer["rule_set"] == rule_set
        judged = [rule["rule"] for rule in (*answer["results"], *answer["unjudged"])]
        assert judged == list(rule_sets[rule_set].rules)
        return answer["verdict"], answer["decided_by"]

    assert ask("either") == ("violation", ["flagged"])
    assert ask("both") == ("allow", ["fine"])
    assert ask("unless") == ("violation", ["flagged", "fine"])
    assert ask("exempt") == ("unjudged", ["metadata.channel"])
    assert ask("exempt", metadata={"channel": "email"}) == ("allow", ["metadata.channel"])
    for name in ("both", "unless"):
        verdict, decided_by = ask(name, **said("cannot be judged"))
        assert verdict == "unjudged" and decided_by


WHOLE_MESSAGES = [
    {"role": "developer", "content": "Be brief.", "name": "ops"},
    {"role": "user", "content": [{"type": "text", "text": "Refund me."}]},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "pay", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "paid"},
]
TOOLS = [{"type": "function", "function": {"name": "pay", "description": "Pays."}}]
IMAGE = {"role": "user", "content": [{"type": "text", "text": "See:"}, {"type": "image_url"}]}


def test_messages_are_judged_as_openai_has_them_with_tools_and_salt(serve: Serve) -> None:
    engine = ToyEngine({"fine": -2.0})
    client = serve(engine)
    for beside in ({}, {"tools": TOOLS, "cache_salt": "tenant 7"}):
        response = client.post("/v1/check", json={"messages": WHOLE_MESSAGES, **beside})
        assert response.json()["verdict"] == "allow", response.text
    turns = (
        Message("system", "From ops:\nBe brief."),
        Message("user", "Refund me."),
        Message("assistant", '{"name": "pay", "arguments": {}}'),
        Message("tool", "From pay:\npaid"),
    )
    described = Message("system", 'Tools:\n{"name": "pay", "description": "Pays."}')
    assert engine.conversations == [turns, (described, *turns)]
    assert engine.salts == [None, "tenant 7"]


def test_beside_an_image_an_allow_is_unjudged(serve: Serve) -> None:
    client = serve(ToyEngine({"fine": -2.0, "flagged": -1.0}))
    answer = client.post("/v1/check", json={"messages": [*MESSAGES, IMAGE]}).json()
    assert answer["verdict"] == "violation" and answer["decided_by"] == ["flagged"]
    assert [result["rule"] for result in answer["results"]] == ["flagged"]
    reason = f"message {len(MESSAGES)} has an image, which no rule reads"
    assert answer["unjudged"] == [{"rule": "fine", "code": "unread_content", "reason": reason}]


def test_the_rules_are_listed_with_wording_and_threshold(client: Client) -> None:
    rules = {rule["rule"]: rule for rule in client.get("/v1/rules").json()}
    assert {name: rule["text"] for name, rule in rules.items()} == RULE_TEXTS
    assert rules["plain"]["threshold"] == 0.25


def turns(client: Client, *contents: str, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content} for content in contents]
    return client.post("/v1/check", json={"messages": messages} | body)


@pytest.mark.parametrize("turn", [0, 1, 4])
def test_a_violated_rule_names_its_turn_and_no_other_rule_does(censored: Client, turn: int) -> None:
    contents = ["hello"] * 5
    contents[turn] = "forbidden"
    answer = turns(censored, *contents, explain=True).json()
    assert answer["verdict"] == "violation"
    (explanation,) = answer["explanations"].values()
    assert answer["explanations"].keys() == {"words"} and explanation["turn"] == turn
    assert explanation["p_after"] > 0.9
    assert ("p_before" in explanation) == (turn > 0)
    assert explanation.get("p_before", 0.0) < 0.1


def test_only_violated_rules_are_asked_again(censored: Client, censor: Censor) -> None:
    assert turns(censored, "hello", "good day", explain=True).json()["explanations"] == {}
    assert len(censor.conversations) == 1
    assert "explanations" not in turns(censored, "hello", "forbidden").json()
    assert len(censor.conversations) == 2
    refused = turns(censored, *["a"] * (MAX_TURNS + 1), explain=True)
    assert refused.status_code == 422 and "can be explained" in refused.text
    assert len(censor.conversations) == 2


def test_the_checks_of_an_explanation_are_counted_as_no_answers(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    with serving(create_app(Censor(), observers=[AuditLog(log)])) as client:
        turns(client, "hello", "forbidden", "hello", explain=True)
        metrics = client.get("/metrics").text
    purposes = [json.loads(line)["purpose"] for line in log.read_text().splitlines()]
    assert purposes == ["answer", "explanation", "explanation"]
    assert 'guard_verdicts_total{rule="words",verdict="violation"} 1.0' in metrics
    assert 'guard_verdicts_total{rule="words",verdict="allow"} 0.0' in metrics
    assert 'guard_checks_total{rule_set="",tenant="",verdict="violation"} 1.0' in metrics


def test_a_verdict_stands_without_an_explanation(censored: Client) -> None:
    answer = turns(censored, "hello", "cannot be judged", "forbidden", explain=True).json()
    assert answer["verdict"] == "unjudged" and answer["explanations"] == {}
    failed = turns(censored, "hello", "breaks", "forbidden", explain=True).json()
    assert failed["verdict"] == "violation" and "explanations" not in failed


def test_explanations_that_take_too_long_leave_a_client_its_verdict(
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
    messages = [{"role": "user", "content": text} for text in ("hello", "forbidden")]
    with httpx.Client(trust_env=False) as own:
        guard = GuardClient(str(censored.base_url), deadline_s=10, http_client=own)
        answer = guard.check(messages, explain=True)
    assert answer.verdict == "violation" and not answer.explanations
    assert len(censor.conversations) == 2


def test_behind_an_unjudged_turn_there_is_no_probability_before(censored: Client) -> None:
    image = {"role": "user", "content": [{"type": "image_url"}]}
    said = [{"role": "user", "content": text} for text in ("hello", "forbidden")]
    body = {"messages": [said[0], image, said[1]], "explain": True}
    explanation = censored.post("/v1/check", json=body).json()["explanations"]["words"]
    assert explanation["turn"] == 2 and explanation["p_after"] > 0.9
    assert "p_before" not in explanation
