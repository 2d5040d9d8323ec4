"""The key of a request: the same while a conversation grows. `tests/serve/api/test_wire_format.py`
asks every wire format.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from guard.conversation.chat import turns_of
from guard.conversation.example import Message
from serve.api.errors import Unjudged
from serve.cluster.front.session import SessionKeys, conversation_key
from serve.cluster.messages import RelayedRequest

SYSTEM = {"role": "system", "content": "You sell shoes."}
ASKED = {"role": "user", "content": "My head hurts."}
GROWN = [SYSTEM, ASKED, {"role": "assistant", "content": "Rest."}, {"role": "user", "content": "?"}]
OTHER = [SYSTEM, {"role": "user", "content": "My knee hurts."}]


def relayed(path: str, body: Any, **headers: str) -> RelayedRequest:
    pairs = tuple(
        (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
    )
    return RelayedRequest("POST", path, headers=pairs, body=json.dumps(body).encode())


def test_a_conversation_that_was_read_has_the_key_of_its_request() -> None:
    keys = SessionKeys()
    session, salt = {"x_session_id": "7"}, {"cache_salt": "one"}
    for messages in (GROWN, OTHER):
        read = [Message(**message) for message in messages]
        asked = {"messages": messages}
        assert conversation_key(read, None, "") == keys.key(relayed("/v1/check", asked))
        salted = keys.key(relayed("/v1/check", asked | salt), "shop")
        assert conversation_key(read, "one", "", "shop") == salted
        in_session = keys.key(relayed("/v1/check", asked, **session))
        assert conversation_key(read, "one", "7") == in_session


TOOL = {"type": "function", "function": {"name": "pay"}}
PARTS = [{"type": "text", "text": "My head"}, {"type": "image_url", "image_url": {"url": "x"}}]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([SYSTEM, ASKED], [TOOL]),
        ([{"role": "developer", "content": "You sell shoes."}, ASKED], []),
        ([SYSTEM, {"role": "user", "content": PARTS}], []),
        ([SYSTEM, {"role": "user", "name": "bob", "content": "Hi"}], []),
    ],
)
def test_whole_messages_have_the_key_of_what_is_read_of_them(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    read = turns_of(messages, tools, where="here")
    asked = relayed("/v1/check", {"messages": messages, "tools": tools})
    assert SessionKeys().key(asked) == conversation_key(read, None, "")


def test_what_comes_after_the_first_user_is_not_read() -> None:
    head = [{"role": "developer", "content": "You sell shoes."}, ASKED]
    key = SessionKeys().key(relayed("/v1/check", {"messages": head}))
    later = [*head, {"role": "assistant", "tool_calls": "no list"}]
    assert SessionKeys().key(relayed("/v1/check", {"messages": later})) == key


def test_the_callers_own_session_counts_before_what_is_said() -> None:
    keys = SessionKeys()
    key = keys.key(relayed("/v1/check", {"messages": GROWN}, x_session_id="7"))
    assert key == keys.key(relayed("/request", {"body": {"messages": OTHER}}, x_session_id="7"))
    assert key != keys.key(relayed("/v1/check", {"messages": GROWN}, x_session_id="8"))
    assert key != keys.key(relayed("/v1/check", {"messages": GROWN}, x_session_id="7"), "shop")


def test_a_reply_goes_where_the_request_of_its_call_went() -> None:
    keys = SessionKeys()
    path = "/beta/litellm_basic_guardrail_api"
    request = {"input_type": "request", "structured_messages": GROWN, "litellm_call_id": "1"}
    reply = {"input_type": "response", "texts": ["Rest."], "litellm_call_id": "1"}
    unknown = keys.key(relayed(path, reply))
    key = keys.key(relayed(path, request))
    assert key == keys.key(relayed("/v1/check", {"messages": GROWN}))
    assert keys.key(relayed(path, reply)) == key != unknown
    assert keys.key(relayed(path, reply), "shop") != key
    webhook = {"body": {"choices": [{"message": {"role": "assistant", "content": "Rest."}}]}}
    keys.key(relayed("/request", {"body": {"messages": GROWN}}, call_id="2"))
    assert keys.key(relayed("/response", webhook, call_id="2")) == key


@pytest.mark.parametrize(
    ("paths", "request_body", "reply_body", "call"),
    [
        (
            ("/beta/litellm_basic_guardrail_api",) * 2,
            {"structured_messages": GROWN, "litellm_call_id": "1"},
            {"input_type": "response", "texts": ["Rest."], "litellm_call_id": "1"},
            {},
        ),
        (
            ("/request", "/response"),
            {"body": {"messages": GROWN}},
            {"body": {"choices": []}},
            {"call_id": "1"},
        ),
    ],
)
def test_a_reply_goes_where_the_request_of_its_call_went_by_its_session(
    paths: tuple[str, str],
    request_body: dict[str, Any],
    reply_body: dict[str, Any],
    call: dict[str, str],
) -> None:
    keys = SessionKeys()
    key = keys.key(relayed(paths[0], request_body, x_session_id="7", **call))
    assert key == keys.key(relayed("/v1/check", {"messages": OTHER}, x_session_id="7"))
    assert keys.key(relayed(paths[1], reply_body, **call)) == key


def test_an_id_of_two_conversations_on_two_replicas_is_unjudged_and_of_one_twice_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = SessionKeys()
    path = "/beta/litellm_basic_guardrail_api"

    def request(messages: list[dict[str, str]]) -> RelayedRequest:
        said = {"input_type": "request", "structured_messages": messages, "litellm_call_id": "1"}
        return relayed(path, said)

    reply = relayed(path, {"input_type": "response", "texts": ["."], "litellm_call_id": "1"})
    for _ in range(2):
        assert keys.key(request(GROWN)) == keys.key(reply)
    for messages in (OTHER, OTHER, GROWN):
        keys.key(request(messages))
        with pytest.raises(Unjudged, match="two conversations"):
            keys.key(reply)
    assert keys.key(reply, "shop")  # of another tenant it is another call's
    now = time.monotonic()
    monkeypatch.setattr("serve.cluster.front.session.time.monotonic", lambda: now + 1000)
    assert keys.key(request(GROWN)) == keys.key(reply)  # of 15 minutes ago nothing is kept


def test_ids_of_calls_are_forgotten_beyond_a_number_and_after_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = SessionKeys(max_calls=2)

    def request(call_id: str) -> RelayedRequest:
        return relayed("/request", {"body": {"messages": GROWN}}, call_id=call_id)

    def reply(call_id: str) -> RelayedRequest:
        return relayed("/response", {"body": {"choices": []}}, call_id=call_id)

    key = keys.key(request("1"))
    keys.key(request("2"))
    keys.key(request("3"))
    assert [keys.key(reply(call_id)) == key for call_id in "123"] == [False, True, True]
    monkeypatch.setattr("serve.cluster.front.session.CALL_S", -1.0)
    keys.key(request("4"))
    assert keys.key(reply("4")) != key


@pytest.mark.parametrize(
    "body", [b"", b"no JSON", b"[1]", b"{}", b'{"messages": 1}', b'{"messages": [1]}', b"[" * 9999]
)
def test_what_is_malformed_has_a_key_too(body: bytes) -> None:
    request = RelayedRequest("POST", "/v1/check", body=body)
    assert SessionKeys().key(request) == SessionKeys().key(request) != ""
