"""agentgateway's webhook over HTTP, and how the gateway reads what comes back."""

from __future__ import annotations

from typing import Any

import httpx
from httpx import Client

from guard.conversation.example import Message
from tests.serve.guarded import CONVERSATION
from tests.serve.serving import MESSAGES
from tests.serve.toy_engine import ToyEngine


def read_by_the_gateway(response: httpx.Response) -> str:
    """What the gateway makes of a body, whatever its status: its untagged enum, in its order."""
    content = response.json()
    if "action" not in content:
        return "error"
    action = content["action"]
    if isinstance(action.get("body"), dict):
        return "mask"
    if isinstance(action.get("body"), str) and isinstance(action.get("status_code"), int):
        return "reject"
    return "pass"


def prompt(client: Client, **headers: str) -> httpx.Response:
    return sent(client, "/request", {"messages": MESSAGES}, headers)


def reply(client: Client, *texts: str, **headers: str) -> httpx.Response:
    choices = [{"message": {"role": "assistant", "content": text}} for text in texts]
    return sent(client, "/response", {"choices": choices}, headers)


def sent(client: Client, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post(path, json={"body": body}, headers=names)


def test_a_violation_is_a_reject_with_a_status_and_the_rest_a_pass(client: Client) -> None:
    rejected = prompt(client)
    assert read_by_the_gateway(rejected) == "reject"
    refusal = {"body": "Refused: violates flagged", "status_code": 403}
    assert rejected.json()["action"] == refusal | {"reason": "violates flagged"}
    passed = prompt(client, guard_rules="fine", call_id="1")
    assert read_by_the_gateway(passed) == "pass"
    assert passed.json()["action"] == {"reason": "no rule is violated"}
    assert read_by_the_gateway(reply(client, "Hi", call_id="1")) == "reject"
    assert read_by_the_gateway(reply(client, "Hi", call_id="1", guard_rules="fine")) == "pass"
    in_two_headers = [("guard-rules", "fine"), ("guard-rules", "flagged,fine")]
    body = {"body": {"messages": MESSAGES}}
    rejected = client.post("/request", json=body, headers=in_two_headers)
    assert rejected.json()["action"]["reason"] == "violates flagged"


def test_every_reply_ends_its_own_conversation(engine: ToyEngine, client: Client) -> None:
    prompt(client, call_id="2", guard_rules="fine")
    engine.conversations.clear()
    reply(client, "One.", "Two.", call_id="2", guard_rules="fine")
    ends = [Message("assistant", text) for text in ("One.", "Two.")]
    assert engine.conversations == [(*CONVERSATION, end) for end in ends]


def test_what_names_no_rule_or_has_no_reply_is_an_error(client: Client) -> None:
    for got, status in ((prompt(client, guard_rules=""), 404), (reply(client, call_id="1"), 422)):
        assert got.status_code == status
        assert read_by_the_gateway(got) == "error" and set(got.json()) == {"error", "code"}


def test_a_rule_set_is_named_by_a_header_and_its_logic_decides(client: Client) -> None:
    assert read_by_the_gateway(prompt(client, guard_rule_set="both")) == "pass"
    unstated = prompt(client, guard_rule_set="staff")
    assert read_by_the_gateway(unstated) == "error" and unstated.status_code == 422
    assert prompt(client, guard_rule_set="nobody").status_code == 404
    both = prompt(client, guard_rule_set="both", guard_rules="fine")
    assert both.status_code == 422 and read_by_the_gateway(both) == "error"
