"""Policies that a request states: judged beside rules, bounded, and nobody else's to see."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from serve.api.input.limits import MAX_POLICY, MAX_RULES, POLICIES
from serve.api.observe.audit import AuditLog
from serve.api.observe.receipts import ReceiptKey
from tests.serve.api import tenants
from tests.serve.serving import MESSAGES, Serve
from tests.serve.toy_engine import LOGITS, RULE_SETS, ToyEngine

VIOLATED, KEPT = "say nothing of a doctor", "never promise a date"  # by what MESSAGES say
SECRET = "Never mention project marker-5b1f"


def post(client: httpx.Client, path: str = "/v1/check", **fields: Any) -> Any:
    body = json.dumps({"messages": MESSAGES} | fields)  # httpx sends no half of a character
    return client.post(path, content=body, headers={"content-type": "application/json"}).json()


def test_a_violated_policy_blocks_like_a_rule_whatever_the_logic_of_the_set(serve: Serve) -> None:
    engine = ToyEngine(LOGITS)
    client = serve(engine, rule_sets=RULE_SETS)
    assert "policies" not in post(client, rule_set="both")
    answer = post(client, rule_set="both", policies=[KEPT, VIOLATED])
    assert (answer["verdict"], answer["decided_by"]) == ("violation", ["policies.1"])
    assert [result["rule"] for result in answer["results"]] == ["flagged", "fine"]
    said = [(policy["rule"], policy["verdict"], policy["by"]) for policy in answer["policies"]]
    assert said == [("policies.0", "allow", "reader"), ("policies.1", "violation", "reader")]
    assert post(client, rules=[], policies=[f" {KEPT}\n"])["verdict"] == "allow"
    last = [*MESSAGES, {"role": "user", "content": "cannot be judged"}]
    unread = post(client, rules=["fine"], policies=[KEPT], messages=last)
    assert (unread["verdict"], unread["policies"]) == ("unjudged", [])
    assert [rule["rule"] for rule in unread["unjudged"]] == ["fine", "policies.0"]
    assert engine.policies == [(), (KEPT, VIOLATED), (KEPT,), (KEPT,)]


MALFORMED: dict[str, dict[str, Any]] = {
    f"policies.0: String should have at most {MAX_POLICY}": {"policies": ["x" * (MAX_POLICY + 1)]},
    "policies.1: says nothing": {"policies": [KEPT, " \u200b"]},
    "policies.0: Input should be a valid string": {"policies": [7]},
    "policies.0: Input should be a valid string, unable": {"policies": ["\ud800"]},
    "policies: one of them stands there twice": {"policies": [KEPT, f"{KEPT} "]},
    "may state 100 in a request, got 101": {"policies": [f"{day}" for day in range(POLICIES + 1)]},
    "rules: name at least one, or state policies": {"rules": []},
}


@pytest.mark.parametrize("error", MALFORMED)
def test_a_bad_policy_is_refused_before_the_engine_is_asked(serve: Serve, error: str) -> None:
    engine = ToyEngine(LOGITS)
    answer = post(serve(engine), **MALFORMED[error])
    assert error in answer["error"] and answer["code"] == "request_refused"
    assert engine.conversations == []


def test_a_request_states_as_many_as_its_sender_may(serve: Serve) -> None:
    engine = ToyEngine(tenants.LOGITS)
    client = serve(engine, rule_sets=tenants.RULE_SETS, tenants=tenants.shop_and_bank())

    def status(sender: str, *policies: str) -> int:
        body = {"messages": MESSAGES[:1], "policies": policies}
        return client.post("/v1/check", json=body, headers=tenants.HEADERS[sender]).status_code

    assert [status("bank", "a", "b"), status("bank", "a", "b", "c")] == [200, 422]
    assert status("shop", KEPT) == 422 and engine.salts == ["bank/"]
    room = 100 - len(MESSAGES[0]["content"])  # of the characters that the bank may send
    assert [status("bank", "a" * room), status("bank", "a" * room, "b")] == [200, 413]
    opening = {"messages": MESSAGES[:1], "policies": ["a" * 50, "b" * 50]}
    stream = client.post("/v1/check/stream", json=opening, headers=tenants.HEADERS["bank"])
    assert stream.status_code == 413 and len(engine.salts) == 2
    alone = serve(ToyEngine(LOGITS), policies=1)
    assert "you may state 1" in post(alone, policies=[KEPT, VIOLATED])["error"]
    many = serve(ToyEngine(dict.fromkeys(map(str, range(MAX_RULES)), -2.0)))
    assert "beside 1,000 rules you may state 0" in post(many, policies=[KEPT])["error"]


def test_explanations_and_streams_are_of_policies_too_and_foreign_formats_not(serve: Serve) -> None:
    engine = ToyEngine({"fine": -2.0})
    client, stated = serve(engine), {"policies": [KEPT, VIOLATED]}
    explanations = post(client, **stated, explain=True)["explanations"]
    assert explanations.keys() == {"policies.1"} and explanations["policies.1"]["turn"] == 1
    assert engine.policies == [(KEPT, VIOLATED), (VIOLATED,), (VIOLATED,)]  # the violated alone
    pieces = [{"append": "Please. "}, {"append": "Ask a doctor."}, {"end": True}]
    lines = [{"messages": MESSAGES[:1]} | stated, *pieces]
    response = client.post("/v1/check/stream", content="\n".join(map(json.dumps, lines)))
    judgement = json.loads(response.text.splitlines()[-1])["judgement"]
    assert judgement["decided_by"] == ["policies.1"] and len(judgement["policies"]) == 2
    foreign = post(client, "/v1/chat/completions", model="fine", **stated)
    assert "policies" in foreign["error"]["message"]


def test_what_operators_look_at_has_no_policy_s_text(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, private = tmp_path / "audit.jsonl", Ed25519PrivateKey.from_private_bytes(bytes(32))
    log = AuditLog(path, ReceiptKey(private.public_key(), private))
    client = serve(ToyEngine({"fine": -2.0, "policies": -2.0}), observers=[log])
    with caplog.at_level(logging.DEBUG):
        stated = ([VIOLATED, SECRET], [SECRET])
        answers = [post(client, rules=["fine"], policies=policies) for policies in stated]
        for said in ("breaks", "cannot be judged"):
            last = {"messages": [{"role": "user", "content": said}]}
            answers.append(post(client, rules=["fine"], policies=[SECRET], **last))
    first, second, _, unread = (json.loads(line) for line in path.read_text().splitlines()[1:])
    assert [rule["rule"] for rule in first["rules"]] == ["fine"]
    of_violated, of_secret = (policy["text"] for policy in first["policies"])
    assert first["policies"][0]["verdict"] == "violation" and of_violated != of_secret
    for line in (second, unread):
        assert [policy["text"] for policy in line["policies"]] == [of_secret]
    metrics = client.get("/metrics").text
    for word, verdicts in (("allow", 2.0), ("violation", 1.0), ("unjudged", 1.0)):
        assert f'guard_verdicts_total{{rule="#policies",verdict="{word}"}} {verdicts}' in metrics
        assert f'guard_verdicts_total{{rule="policies",verdict="{word}"}} 0.0' in metrics
    for text in (path.read_text(), caplog.text, json.dumps(answers), metrics):
        assert SECRET[-11:] not in text
