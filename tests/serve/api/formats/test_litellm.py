"""LiteLLM's generic guardrail API over HTTP, with the bodies that LiteLLM 1.106 sends.

LiteLLM itself wants an older openai than ours, so it is not among the pins.
A request's conversation is kept until its reply comes, and never another call's.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from httpx import Client

from guard.conversation.chat import PartlyRead
from guard.conversation.example import Message
from serve.api.calls import OVERHEAD_CHARACTERS, CallsUnderWay
from serve.api.errors import Unjudged
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
    two = [{"role": "user", "content": text} for text in ("Bye", "Hello")]
    in_another_order = ask(client, "o", "fine", structured_messages=two, texts=["Hello", "Bye"])
    assert in_another_order.json() == {"action": "NONE"}
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


def test_every_reply_is_judged_with_the_tool_calls_also_one_that_only_models_read(
    engine: ToyEngine, client: Client
) -> None:
    in_tag_characters = "".join(chr(0xE0000 + ord(sign)) for sign in "Take 800 mg.")
    ask(client, "2", "fine")
    engine.conversations.clear()
    answer(client, "2", "fine", texts=["One.", in_tag_characters, " "], tool_calls=[CALL])
    call = '{"name": "pay", "arguments": {"to": "Bo"}}'
    judged = [messages[-1].content for messages in engine.conversations]
    assert judged == [f"One.\n{call}", f"{in_tag_characters}\n{call}"]
    answer(client, "2", "fine", texts=[], tool_calls=[CALL])
    assert engine.conversations[-1][-1] == Message("assistant", call)


def test_replies_with_long_tool_calls_are_limited(engine: ToyEngine, client: Client) -> None:
    ask(client, "2l", "fine")
    call = {"function": {"name": "pay", "arguments": "\\u0041x" * 40_000}}
    engine.conversations.clear()
    many = answer(client, "2l", "fine", texts=["a"] * 256, tool_calls=[call])
    assert many.status_code == 422 and "more than 1000000 characters" in many.json()["error"]
    assert len(engine.conversations) == 12  # of some 80,000 characters each


def test_a_request_without_messages_is_its_texts(engine: ToyEngine, client: Client) -> None:
    sent = {"texts": ["One.", "Two."], "tool_calls": [CALL]}
    tool = {"type": "function", "function": {"name": "pay"}}
    ask(client, "3", "fine", structured_messages=None, tools=[tool], **sent)
    call = Message("assistant", '{"name": "pay", "arguments": {"to": "Bo"}}')
    described = Message("system", 'Tools:\n{"name": "pay"}')
    said = (described, Message("user", "One."), Message("user", "Two."), call)
    assert engine.conversations[-1] == said


def test_a_violation_blocks_beside_what_no_rule_reads_and_an_allow_is_none(client: Client) -> None:
    violating, fine, long = ["it violates"], ["it is fine"], "a" * 1_000_001
    ask(client, "5", "fine")
    for fields in (
        {"texts": [*violating, " "]},
        {"texts": violating, "images": IMAGE},
        {"texts": [*violating, long]},
    ):
        assert answer(client, "5", "flagged", **fields).json()["action"] == "BLOCKED"
    assert answer(client, "5", "fine", texts=[*fine, " "]).json() == {"action": "NONE"}
    assert answer(client, "5", "fine", texts=[*fine, long]).status_code == 422
    no_chat: dict[str, Any] = {"structured_messages": None, "images": IMAGE}
    request = ask(client, "6", "flagged", texts=violating, **no_chat)
    assert request.json()["action"] == "BLOCKED"
    for seen, why in (
        (answer(client, "5", "fine", images=IMAGE), "message 0 has an image"),
        (ask(client, "7", "fine", texts=fine, **no_chat), "has an image"),
        (ask(client, "7", "fine", texts=[], **no_chat), "has an image"),
        (answer(client, "never seen", "fine"), "the reply's conversation is not known here"),
    ):
        assert seen.status_code == 422 and why in seen.json()["error"]


def test_a_rule_set_and_its_metadata_are_the_gateway_s_parameters(client: Client) -> None:
    def asked(**params: Any) -> httpx.Response:
        return ask(client, "sets", additional_provider_specific_params=params)

    unstated = asked(rule_set="staff")
    assert unstated.status_code == 422 and "metadata.audience" in unstated.json()["error"]
    for audience, action in (("staff", "NONE"), ("customers", "BLOCKED")):
        answered = asked(rule_set="staff", metadata={"audience": audience})
        assert answered.json()["action"] == action
    for name, wrong, status in (
        ("rule_set", "nobody", 404),
        ("rules", ["nobody"], 404),
        ("rules", "flagged", 422),
    ):
        assert asked(**{name: wrong}).status_code == status


def test_a_long_chat_s_texts_are_not_counted_since_its_messages_are_read(client: Client) -> None:
    """LiteLLM sends every message's text beside the messages."""
    messages = [{"role": "user", "content": f"Message {number}"} for number in range(300)]
    texts = [message["content"] for message in messages]
    chat = ask(client, "long", "fine", structured_messages=messages, texts=texts)
    assert chat.json() == {"action": "NONE"}
    no_chat = ask(client, "long", "fine", structured_messages=None, texts=texts)
    assert no_chat.status_code == 422 and "300 texts; the limit is 256" in no_chat.text
    assert answer(client, "long", "fine", texts=texts).status_code == 422
    refused = ask(client, "x" * 201, "fine")  # an id that is no call's is not kept
    assert refused.status_code == 422 and "litellm_call_id" in refused.json()["error"]


def test_what_was_not_let_pass_is_not_kept_unless_a_gateway_may_let_it_pass(client: Client) -> None:
    """It has no reply, and would push out those that have one."""
    image = [{"type": "text", "text": "Hi"}, {"type": "image_url"}]
    ask(client, "let pass", "fine")
    for content, rule, status, is_kept in (
        ("cannot be judged", "fine", 422, False),
        ("Hi", "flagged", 200, False),
        ("breaks", "fine", 503, True),
        (image, "fine", 422, True),
    ):
        said = [{"role": "user", "content": content}]
        call_id = f"{content} to {rule}"[:200]
        assert ask(client, call_id, rule, structured_messages=said).status_code == status
        replied = answer(client, call_id, "flagged")
        assert ("is not known here" in replied.text) is not is_kept
        if not is_kept:
            ask(client, "let pass", rule, structured_messages=said)
            assert answer(client, "let pass", "fine").json() == {"action": "NONE"}


HELLO = (Message("user", "Hello"),)
OTHER = (Message("user", "Good morning"),)


def test_a_conversation_is_there_for_every_reply_to_it_with_its_salt_and_no_other() -> None:
    calls = CallsUnderWay()
    calls.keep("1", HELLO, "tenant 7")
    calls.keep("1", HELLO, "tenant 7")
    calls.keep("2", OTHER)
    for _ in range(2):  # a reply that streams is checked several times
        assert (calls.find("1").messages, calls.find("1").cache_salt) == (HELLO, "tenant 7")
    assert calls.find("2").messages == OTHER
    for unknown in ("3", "", None):
        with pytest.raises(Unjudged, match="conversation is not known here"):
            calls.find(unknown)
    calls.keep("1", OTHER)
    calls.keep("1", OTHER)
    with pytest.raises(Unjudged, match="two conversations"):
        calls.find("1")


def test_old_calls_are_forgotten_and_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CallsUnderWay(3 * (5 + 2 * OVERHEAD_CHARACTERS))
    for call_id in "1234":  # each has one message of five characters
        calls.keep(call_id, HELLO)
    with pytest.raises(Unjudged):
        calls.find("1")
    assert calls.find("2").messages == calls.find("4").messages == HELLO
    monkeypatch.setattr("serve.api.calls.CALL_S", 0.0)
    calls = CallsUnderWay()
    calls.keep("1", HELLO)
    with pytest.raises(Unjudged):
        calls.find("1")
    assert (calls._calls, calls._characters) == ({}, 0)


def test_messages_without_a_text_and_what_cannot_be_read_take_room_too() -> None:
    calls = CallsUnderWay(max_characters=10_000)
    for number in range(10):
        calls.keep(str(number), (Message("user", ""),) * 20)
    assert len(calls._calls) == 2
    unread = tuple(f"message 0 has a part of type {number}" for number in range(1000))
    calls.keep("unread", (PartlyRead("user", "", unread),))
    assert calls._calls == {}
