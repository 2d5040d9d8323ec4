"""The key of a request: the same while a conversation grows. `tests/serve/api/test_wire_format.py`
asks every wire format.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from pytest import MonkeyPatch

from guard.conversation.chat import turns_of
from serve.api.errors import Unjudged
from serve.api.session import conversation_key
from serve.cluster.front.session import SessionKeys
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


TOOL = {"type": "function", "function": {"name": "pay"}}
PARTS = [{"type": "text", "text": "My head"}, {"type": "image_url", "image_url": {"url": "x"}}]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        (GROWN, []),
        ([SYSTEM, ASKED], [TOOL]),
        ([{"role": "developer", "content": "You sell shoes."}, ASKED], []),
        ([SYSTEM, {"role": "user", "content": PARTS}], []),
        ([SYSTEM, {"role": "user", "name": "bob", "content": "Hi"}], []),
    ],
)
def test_what_is_read_of_messages_has_the_key_of_their_request(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    read = turns_of(messages, tools, where="here")
    keys, asked = SessionKeys(), {"messages": messages, "tools": tools}
    key = keys.key(relayed("/v1/check", asked))
    assert conversation_key(read, None, "") == key
    # Of turns behind the first user's nothing is read.
    grown = asked | {"messages": [*messages, {"role": "assistant", "tool_calls": "no list"}]}
    assert keys.key(relayed("/v1/check", grown)) == key
    salted = keys.key(relayed("/v1/check", asked | {"cache_salt": "one"}), "shop")
    assert conversation_key(read, "one", "", "shop") == salted != key
    in_session = keys.key(relayed("/v1/check", asked, x_session_id="7"))
    assert conversation_key(read, "one", "7") == in_session != key


def test_the_callers_own_session_counts_before_what_is_said() -> None:
    keys = SessionKeys()
    key = keys.key(relayed("/v1/check", {"messages": GROWN}, x_session_id="7"))
    assert key == keys.key(relayed("/v1/check/stream", {"messages": OTHER}, x_session_id="7"))
    assert key != keys.key(relayed("/v1/check", {"messages": GROWN}, x_session_id="8"))
    assert key != keys.key(relayed("/v1/check", {"messages": GROWN}, x_session_id="7"), "shop")


def litellm(messages: Any = None, call_id: str = "1", **headers: str) -> RelayedRequest:
    """The request of a call, or its reply."""
    said = {"input_type": "response", "texts": ["Rest."]}
    if messages:
        said = {"input_type": "request", "structured_messages": messages}
    path = "/beta/litellm_basic_guardrail_api"
    return relayed(path, said | {"litellm_call_id": call_id}, **headers)


def test_a_reply_goes_where_the_request_of_its_call_went() -> None:
    """By its conversation, or its session."""
    keys = SessionKeys()
    unknown = keys.key(litellm())
    key = keys.key(litellm(GROWN))
    assert key == keys.key(relayed("/v1/check", {"messages": GROWN}))
    assert keys.key(litellm()) == key != unknown
    assert keys.key(litellm(), "shop") != key
    in_session = keys.key(litellm(GROWN, "2", x_session_id="7"))
    assert in_session == keys.key(relayed("/v1/check", {"messages": OTHER}, x_session_id="7"))
    assert keys.key(litellm(call_id="2")) == in_session


def test_an_id_of_two_conversations_on_two_replicas_is_unjudged_and_of_one_twice_is_not() -> None:
    keys = SessionKeys()
    for _ in range(2):
        assert keys.key(litellm(GROWN)) == keys.key(litellm())
    for messages in (OTHER, OTHER, GROWN):
        keys.key(litellm(messages))
        with pytest.raises(Unjudged, match="two conversations"):
            keys.key(litellm())
    assert keys.key(litellm(), "shop")  # of another tenant it is another call's


def test_ids_of_calls_are_forgotten_beyond_a_number_and_after_a_time(
    monkeypatch: MonkeyPatch,
) -> None:
    keys = SessionKeys(max_calls=2)
    (key,) = {keys.key(litellm(GROWN, call_id)) for call_id in "123"}
    found = [keys.key(litellm(call_id=call_id)) == key for call_id in "123"]
    assert found == [False, True, True]
    now = time.monotonic()
    monkeypatch.setattr("serve.cluster.front.session.time.monotonic", lambda: now + 1000)
    assert keys.key(litellm(call_id="3")) != key  # 15 minutes are over


MALFORMED = (b"", b"no JSON", b"[1]", b"[" * 9999, b"{}", b'{"messages": 1}', b'{"messages": [1]}')


def test_what_is_malformed_has_a_key_too() -> None:
    for body in MALFORMED:
        request = RelayedRequest("POST", "/v1/check", body=body)
        assert SessionKeys().key(request) == SessionKeys().key(request) != ""
