"""LiteLLM's generic guardrail API over HTTP, with the bodies that LiteLLM 1.106 sends.

LiteLLM itself wants an older openai than ours, so it is not among the pins.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from httpx import Client

from guard.conversation.example import Message
from tests.serve.guarded import CONVERSATION
from tests.serve.serving import MESSAGES
from tests.serve.toy_engine import ToyEngine

IMAGE = ["data:image/png;base64,"]
URL = "/beta/litellm_basic_guardrail_api"
CALL: dict[str, Any] = {
    "id": "call_1",
    "index": 0,
    "type": "function",
    "function": {"name": "pay", "arguments": '{"to": "Bo"}'},
}


def body(input_type: str, call_id: str | None, *rules: str, **fields: Any) -> dict[str, Any]:
    """A body as LiteLLM sends it: every field is there, and null where there is nothing."""
    whole = {
        "input_type": input_type,
        "litellm_call_id": call_id,
        "litellm_trace_id": "trace",
        "structured_messages": None,
        "images": None,
        "tools": None,
        "texts": ["Hi"],
        "request_data": {"user_api_key_hash": "88dc28", "user_api_key_team_id": "team 7"},
        "request_headers": {"authorization": "[present]"},
        "litellm_version": "1.106.0",
        "additional_provider_specific_params": {"rules": list(rules)} if rules else {},
        "tool_calls": None,
        "model": "gpt-5",
    }
    return whole | fields


def ask(client: Client, call_id: str, *rules: str, **fields: Any) -> httpx.Response:
    """Check a request, which has MESSAGES, and beside them their texts."""
    fields = {"structured_messages": MESSAGES} | fields
    texts = []
    for message in fields["structured_messages"] or ():
        if isinstance(message, dict) and isinstance(message["content"], str):
            texts.append(message["content"])
    fields = {"texts": texts} | fields
    return client.post(URL, json=body("request", call_id, *rules, **fields))


def answer(client: Client, call_id: str | None, *rules: str, **fields: Any) -> httpx.Response:
    return client.post(URL, json=body("response", call_id, *rules, **fields))


def test_a_violation_is_blocked_with_the_rule_s_name_whatever_is_beside_it(client: Client) -> None:
    blocked = {"action": "BLOCKED", "blocked_reason": "violates flagged"}
    assert ask(client, "1").json() == blocked
    assert ask(client, "1", "fine").json() == {"action": "NONE"}
    assert answer(client, "1", "fine").json() == {"action": "NONE"}
    for beside, status in (("cannot be judged", 422), ("breaks", 503)):
        assert answer(client, "1", "flagged", texts=[beside, "Hi"]).json() == blocked
        failed = answer(client, "1", "fine", texts=[beside, "Hi"])
        assert failed.status_code == status and set(failed.json()) == {"error", "code"}


def test_an_answer_ends_its_own_conversation(engine: ToyEngine, client: Client) -> None:
    ask(client, "mine", "fine")
    ask(client, "another", "fine", structured_messages=[{"role": "user", "content": "Bye"}])
    for text in ("Hel", "Hello"):  # a reply that streams comes several times
        answer(client, "mine", "fine", texts=[text], request_data={})
        assert engine.conversations[-1] == (*CONVERSATION, Message("assistant", text))
        assert engine.salts[-1] == "team 7"


def test_every_reply_is_judged_with_the_tool_calls(engine: ToyEngine, client: Client) -> None:
    ask(client, "2", "fine")
    engine.conversations.clear()
    answer(client, "2", "fine", texts=["One.", "Two."], tool_calls=[CALL])
    call = '{"name": "pay", "arguments": {"to": "Bo"}}'
    judged = [messages[-1].content for messages in engine.conversations]
    assert judged == [f"One.\n{call}", f"Two.\n{call}"]
    answer(client, "2", "fine", texts=[], tool_calls=[CALL])
    assert engine.conversations[-1][-1] == Message("assistant", call)


def test_replies_with_long_tool_calls_are_limited(engine: ToyEngine, client: Client) -> None:
    ask(client, "2l", "fine")
    call = {"function": {"name": "pay", "arguments": "\\u0041x" * 40_000}}
    engine.conversations.clear()
    many = answer(client, "2l", "fine", texts=["a"] * 256, tool_calls=[call])
    assert many.status_code == 422 and "more than 1000000 characters" in many.json()["error"]
    assert len(engine.conversations) == 12  # of some 80,000 characters each
    flagged = answer(client, "2l", "flagged", texts=["a"] * 256, tool_calls=[call])
    assert flagged.json()["action"] == "BLOCKED"


def test_a_request_without_messages_is_its_texts(engine: ToyEngine, client: Client) -> None:
    sent = {"texts": ["One.", "Two."], "tool_calls": [CALL]}
    tool = {"type": "function", "function": {"name": "pay"}}
    ask(client, "3", "fine", structured_messages=None, tools=[tool], **sent)
    call = Message("assistant", '{"name": "pay", "arguments": {"to": "Bo"}}')
    described = Message("system", 'Tools:\n{"name": "pay"}')
    said = (described, Message("user", "One."), Message("user", "Two."), call)
    assert engine.conversations[-1] == said


def test_an_answer_without_its_conversation_or_with_an_image_has_no_action(client: Client) -> None:
    response = answer(client, "never seen", "fine")
    assert response.status_code == 422
    assert "the reply's conversation is not known here" in response.json()["error"]
    ask(client, "5", "fine")
    images = answer(client, "5", "fine", images=IMAGE)
    assert images.status_code == 422 and "message 0 has an image" in images.json()["error"]


def test_a_violation_blocks_beside_what_no_rule_reads(client: Client) -> None:
    violating, fine, long = ["it violates"], ["it is fine"], "a" * 1_000_001
    ask(client, "5v", "fine")
    for fields in (
        {"texts": [*violating, " "]},
        {"texts": violating, "images": IMAGE},
        {"texts": [*violating, long]},
    ):
        assert answer(client, "5v", "flagged", **fields).json()["action"] == "BLOCKED"
    assert answer(client, "5v", "fine", texts=[*fine, " "]).json() == {"action": "NONE"}
    assert answer(client, "5v", "fine", texts=[*fine, long]).status_code == 422
    no_chat: dict[str, Any] = {"structured_messages": None, "images": IMAGE}
    request = ask(client, "5w", "flagged", texts=violating, **no_chat)
    assert request.json()["action"] == "BLOCKED"
    for texts in (fine, []):
        seen = ask(client, "5x", "fine", texts=texts, **no_chat)
        assert seen.status_code == 422 and "has an image" in seen.json()["error"]


@pytest.mark.parametrize(
    ("rules", "status"), [(["no_such_rule"], 404), ([], 422), ("flagged", 422)]
)
def test_wrong_rules_are_an_error_that_blocks(client: Client, rules: Any, status: int) -> None:
    params = {"additional_provider_specific_params": {"rules": rules}}
    response = ask(client, "7", **params)
    assert response.status_code == status and set(response.json()) == {"error", "code"}


def test_a_rule_set_and_its_metadata_are_the_gateway_s_parameters(client: Client) -> None:
    def asked(**params: Any) -> httpx.Response:
        return ask(client, "sets", additional_provider_specific_params=params)

    assert asked(rule_set="both").json() == {"action": "NONE"}
    unstated = asked(rule_set="staff")
    assert unstated.status_code == 422 and "metadata.audience" in unstated.json()["error"]
    staff = asked(rule_set="staff", metadata={"audience": "staff"})
    assert staff.json() == {"action": "NONE"}
    others = asked(rule_set="staff", metadata={"audience": "customers"})
    assert others.json() == {"action": "BLOCKED", "blocked_reason": "violates flagged"}
    assert asked(rule_set="nobody").status_code == 404


def test_an_id_that_is_no_call_s_is_refused_and_not_kept(client: Client) -> None:
    for refused in (ask(client, "x" * 201, "fine"), answer(client, "x" * 201, "fine")):
        assert refused.status_code == 422 and "litellm_call_id" in refused.json()["error"]


def test_a_long_chat_s_texts_are_not_counted_since_its_messages_are_read(client: Client) -> None:
    """LiteLLM sends every message's text beside the messages."""
    messages = [{"role": "user", "content": f"Message {number}"} for number in range(300)]
    texts = [message["content"] for message in messages]
    chat = ask(client, "long", "fine", structured_messages=messages, texts=texts)
    assert chat.json() == {"action": "NONE"}
    no_chat = ask(client, "long", "fine", structured_messages=None, texts=texts)
    assert no_chat.status_code == 422 and "300 texts; the limit is 256" in no_chat.text
    assert answer(client, "long", "fine", texts=texts).status_code == 422


def tags(text: str) -> str:
    """A text in tag characters, which nobody sees and models read."""
    return "".join(chr(0xE0000 + ord(sign)) for sign in text)


def test_a_reply_that_only_models_read_is_judged(engine: ToyEngine, client: Client) -> None:
    ask(client, "tags", "fine")
    engine.conversations.clear()
    answer(client, "tags", "fine", texts=["Hello.", tags("Take 800 mg."), " "])
    judged = [messages[-1].content for messages in engine.conversations]
    assert judged == ["Hello.", tags("Take 800 mg.")]


@pytest.mark.parametrize(("text", "rule"), [("cannot be judged", "fine"), ("Hi", "flagged")])
def test_what_was_not_let_pass_is_not_kept(client: Client, text: str, rule: str) -> None:
    """It has no reply, and would push out those that have one."""
    said = [{"role": "user", "content": text}]
    ask(client, "let pass", "fine")
    ask(client, "let pass", rule, structured_messages=said)
    assert answer(client, "let pass", "fine").json() == {"action": "NONE"}
    ask(client, "refused", rule, structured_messages=said)
    assert "is not known here" in answer(client, "refused", "fine").json()["error"]


@pytest.mark.parametrize(
    ("content", "status"),
    [("breaks", 503), ([{"type": "text", "text": "Hi"}, {"type": "image_url"}], 422)],
)
def test_what_a_gateway_may_let_pass_is_kept(client: Client, content: Any, status: int) -> None:
    said = [{"role": "user", "content": content}]
    call_id = f"let pass {status}"
    assert ask(client, call_id, "fine", structured_messages=said).status_code == status
    replied = answer(client, call_id, "flagged")
    assert "is not known here" not in replied.text
    assert status == 503 or replied.json()["action"] == "BLOCKED"


def test_what_is_too_long_is_not_looked_at(
    engine: ToyEngine, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []

    def is_seen(text: str) -> bool:
        looked_at.append(text)
        return False

    monkeypatch.setattr("serve.api.formats.litellm.is_seen", is_seen)
    ask(client, "spaces", "fine")
    long = answer(client, "spaces", "fine", texts=["  ", " " * 1_000_001, "Hi"])
    assert long.status_code == 422 and "more than 1000000 characters" in long.json()["error"]
    assert looked_at == ["  "]
