"""Every format reads a message in the same way, stored rows too: what says nothing is an empty
turn, and what stands where nobody reads it is never allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from guard.conversation.chat import PartlyRead
from guard.conversation.example import Message
from guard.conversation.row import conversation_of
from guard.errors import GuardError
from serve.api.app import create_app
from serve.api.formats.litellm import PATH as LITELLM
from serve.api.wire_format import RULE
from tests.serve.serving import serving
from tests.serve.wire_requests import HI, WHOLE, Case, Messages, WireRequest, outcome
from tests.serve.word_engine import WORDS, WordEngine

WORD = WORDS[RULE]
REPLY = {"role": "assistant", "content": "Hello."}
every_case = pytest.mark.parametrize("case", WHOLE, ids=str)
# Ways to say nothing.
SILENT: list[dict[str, Any]] = [
    {},
    {"content": " \n"},
    {"content": "\u200b"},
    {"content": []},
    {"content": [{"type": "text", "text": ""}]},
    {"content": None, "refusal": None, "tool_calls": [], "function_call": None, "audio": None},
    {"content": None, "reasoning_content": "I should say ibuprofen.", "annotations": []},
    {"content": [{"type": "thinking", "thinking": "I should say ibuprofen.", "signature": "x"}]},
]
SENTENCE = f"Take {WORD}."
# What carries words under a key that no rule reads: of a message, or of its text;
# tests/guard/conversation/test_keys.py has all kinds.
HIDDEN: list[dict[str, Any]] = [
    {"content_blocks": [{"type": "text", "text": WORD}]},
    {"text": WORD},
    {"Content": WORD},
    {SENTENCE: 1},
    {"id": SENTENCE},
    {"usage": {"t": WORD}},
    {"metadata": {"x": SENTENCE}},
    {"images": [{"image_url": {"url": "x"}}]},
    {"content": [{"type": "text", "text": "Hello.", "content": WORD}]},
    {"content": [{"type": "output_text", "text": "Hello.", "citations": [{"cited_text": WORD}]}]},
]
# What ordinary clients and gateways have beside a message's text.
ORDINARY: list[dict[str, Any]] = [
    {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
    {"reasoning_content": "Hm.", "provider_specific_fields": {"refusal": None}},
    {"thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}]},
    {"cache_control": {"type": "ephemeral"}, "created_at": "2026-01-01"},
    {"content": [{"type": "text", "text": "Hello.", "cache_control": {"type": "ephemeral"}}]},
    {"content": [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}]},
    {"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Hello."}]},
    {
        "content": [
            {"type": "text", "text": "Hello.", "thought_signature": "Zm9v", "reasoning": "a b"}
        ]
    },
    {"tool_name": "pay", "call_id": "call_1", "user": "7", "encrypted_content": "Zm9v="},
    {"usage": {"input_tokens": 5, "service_tier": "standard"}, "index": 1, "timestamp": 1.5},
    # What says nothing, under whatever key.
    {"prefix": True, "images": [], "weight": 1, "x": "", "y": {"a": 1}, "z": [1, None]},
]


@pytest.fixture(scope="module")
def engine() -> WordEngine:
    return WordEngine()


@pytest.fixture(scope="module")
def client(engine: WordEngine) -> Iterator[httpx.Client]:
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        yield client


def judged(client: httpx.Client, case: Case, messages: Messages) -> str:
    """What the format says of the conversation."""
    return outcome(case, case.ask(client, messages))


@pytest.mark.parametrize("said", SILENT)
@every_case
def test_a_turn_that_says_nothing_is_an_empty_turn(
    engine: WordEngine, client: httpx.Client, case: Case, said: dict[str, Any]
) -> None:
    messages = [HI, {"role": "assistant", **said}]
    assert judged(client, case, messages) == "allow"
    user, silent = engine.conversations[-1][:2]
    assert user == Message("user", "Hi") and type(silent) is Message
    assert silent.role == "assistant" and not silent.content.strip(" \n\u200b")
    assert conversation_of({"messages": messages}) == (user, silent)


@pytest.mark.parametrize("said", SILENT)
@every_case
def test_where_nothing_is_said_nothing_is_judged(
    engine: WordEngine, client: httpx.Client, case: Case, said: dict[str, Any]
) -> None:
    asked = len(engine.conversations)
    messages = [{"role": "user", **said}, {"role": "assistant", **said}]
    assert judged(client, case, messages) == "unjudged"
    assert len(engine.conversations) == asked
    with pytest.raises(GuardError, match="the conversation is empty"):
        conversation_of({"messages": messages})


@pytest.mark.parametrize("text", ["", " \n", "\u200b"])
def test_a_text_that_says_nothing_is_not_judged(client: httpx.Client, text: str) -> None:
    parts = [{"type": "text", "text": text}]
    for body in ({"input": text}, {"input": ["Hi", text]}, {"input": parts}):
        request = WireRequest("/v1/moderations", (body,), {})
        assert outcome(request, request.send(client)) == "unjudged"
    request = WireRequest(f"/{RULE}/api/v1/text/contents", ({"contents": [text]},), {})
    assert outcome(request, request.send(client)) == "unjudged"


@pytest.mark.parametrize("hidden", HIDDEN)
@every_case
def test_words_under_a_key_that_no_rule_reads_are_never_allowed(
    client: httpx.Client, case: Case, hidden: dict[str, Any]
) -> None:
    for messages in ([HI, REPLY | hidden], [HI | hidden, REPLY]):
        assert judged(client, case, messages) == "unjudged"
    stored = conversation_of({"messages": [HI, REPLY | hidden]})[-1]
    assert isinstance(stored, PartlyRead) and "message 1 has the key" in stored.unread[0]


@every_case
def test_beside_hidden_words_a_violation_is_one(client: httpx.Client, case: Case) -> None:
    """Our own formats refuse unknown keys."""
    response = case.ask(client, [HI, REPLY | {"content": WORD, "parts": ["Hi"]}])
    is_refused = response.status_code == 422 and "parts" in response.text
    assert is_refused or outcome(case, response) == "violation"


@pytest.mark.parametrize("ordinary", ORDINARY)
@every_case
def test_what_clients_have_beside_a_text_changes_nothing(
    engine: WordEngine, client: httpx.Client, case: Case, ordinary: dict[str, Any]
) -> None:
    assert judged(client, case, [HI, REPLY | ordinary]) == "allow"
    assert engine.conversations[-1][:2] == (Message("user", "Hi"), Message("assistant", "Hello."))


@pytest.mark.parametrize("key", ["id", "index", "type", "extra_content"])
@every_case
def test_a_call_s_id_is_left_out_and_a_sentence_in_its_place_is_read(
    engine: WordEngine, client: httpx.Client, case: Case, key: str
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "pay", "arguments": "{}"}}
    messages = [HI, {"role": "assistant", "tool_calls": [call | {key: SENTENCE}]}]
    assert judged(client, case, messages) == ("allow" if key == "extra_content" else "violation")
    judged(client, case, [HI, {"role": "assistant", "tool_calls": [call]}])
    assert engine.conversations[-1][1].content == '{"name": "pay", "arguments": {}}'


CHAT = {"messages": [HI]}
# Words beside the conversation; the contract hides some under an unknown key of every body.
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"model": RULE} | CHAT | {"response_format": {"type": "text", "x": WORD}},
    ),
    ("/v1/chat/completions", {"model": RULE} | CHAT | {"tools": [{"function": {"x": WORD}}]}),
    ("/v1/chat/completions", {"model": RULE} | CHAT | {"functions": [{"description": WORD}]}),
    ("/v1/moderations", {"model": RULE, "input": [{"type": "text", "text": "Hi", "x": WORD}]}),
    (LITELLM, {"input_type": "request", "structured_messages": [HI], "texts": ["Hi", WORD]}),
    (LITELLM, {"input_type": "request", "texts": ["Hi"], "request_data": {"text": WORD}}),
    (LITELLM, {"input_type": "request", "texts": ["Hi"], "usage": {"t": WORD}}),
    (LITELLM, {"input_type": "request", "texts": ["Hi"], "litellm_trace_id": SENTENCE}),
    (
        LITELLM,
        {
            "input_type": "request",
            "structured_messages": [HI],
            "tool_calls": [{"function": {"name": "pay", "arguments": WORD}}],
        },
    ),
    (LITELLM, {"input_type": "request", "structured_messages": [HI], "images": ["data:"]}),
    ("/request", {"body": CHAT | {"system": WORD}}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_words_beside_the_conversation_are_read_or_refused(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    request = WireRequest(path, (body,), {})
    assert outcome(request, request.send(client)) != "allow"


@pytest.mark.parametrize("beside", [{"text": WORD}, {"delta": {"content": WORD}}])
def test_words_beside_the_message_of_a_choice_are_refused(
    client: httpx.Client, beside: dict[str, Any]
) -> None:
    (case,) = [case for case in WHOLE if case.example.path == "/response"]
    prompt, reply = case.requests([HI, REPLY])
    prompt.send(client)
    whole = {"index": 0, "finish_reason": "stop", "logprobs": {"content": []}, "message": REPLY}
    for choice, expected in ((whole, "allow"), (whole | beside, "unjudged")):
        sent = WireRequest(reply.path, ({"body": {"choices": [choice]}},), reply.headers)
        assert outcome(sent, sent.send(client)) == expected


def test_a_chat_s_own_texts_images_and_calls_beside_it_change_nothing(client: httpx.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "pay", "arguments": "{}"}}
    reordered = {"index": 0, "function": {"arguments": "{}", "name": "pay"}, "id": "1"}
    text = {"type": "text", "text": "Two\n\nlines."}
    messages = [{"role": "user", "content": [text]}, {"role": "assistant", "tool_calls": [call]}]
    body = {"input_type": "request", "structured_messages": messages, "tool_calls": [reordered]}
    beside = {"texts": [text["text"], "", "Two\n\nli"], "usage": {"prompt_tokens": 5}}
    request = WireRequest(LITELLM, (body | beside,), {})
    assert outcome(request, request.send(client)) == "allow"
