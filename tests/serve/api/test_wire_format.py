"""The contract of every wire format, by the examples that it states: who may ask, what is refused,
how a client reads what comes back, how it reads messages, as stored rows are read too, and the same
from a cluster.

A format that is added to the table is asked here too, one of your own with CENTURION_HOME set.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from httpx import Client

from guard.conversation.chat import PartlyRead
from guard.conversation.example import Message
from guard.conversation.row import conversation_of
from guard.errors import GuardError
from serve.api.app import create_app
from serve.api.formats.litellm import PATH as LITELLM
from serve.api.formats.table import wire_formats
from serve.api.wire_format import RULE
from serve.cluster.front.session import SessionKeys
from serve.cluster.messages import RelayedRequest
from serve.engine.codes import Code
from serve.policy.rule_set import RuleSet
from tests.serve.api.tenants import HEADERS, shop_and_bank
from tests.serve.cluster.words_cluster import SIX_RULES, LocalCluster, rules_on
from tests.serve.cluster.words_engine import VIOLATES, WordsEngine
from tests.serve.guarded import guard_engine
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine
from tests.serve.wire_requests import CASES, HI, WHOLE, Case, WireRequest, outcome, readings
from tests.serve.word_engine import BREAKS, CANNOT_BE_JUDGED, WORDS, WordEngine

WORD = WORDS[RULE]
SENTENCE = f"Take {WORD}."
REPLY = {"role": "assistant", "content": "Hello."}
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_whole_case = pytest.mark.parametrize("case", WHOLE, ids=str)
every_format = pytest.mark.parametrize("name", wire_formats())


@pytest.fixture(scope="module")
def engine() -> WordEngine:
    return WordEngine()


@pytest.fixture(scope="module")
def client(engine: WordEngine) -> Iterator[Client]:
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        yield client


@every_format
def test_a_format_has_examples_on_paths_of_its_own(name: str) -> None:
    stated = wire_formats()[name]
    assert stated.requests and bool(stated.replies) == bool(stated.call_id)
    for example in (*stated.requests, *stated.replies):
        having = [other for other, one in wire_formats().items() if one.has_path(example.path)]
        assert having == [name]


@every_format
def test_an_error_says_what_and_why_and_nothing_that_reads_as_a_verdict(name: str) -> None:
    for code in get_args(Code):
        for status in (400, 422, 500, 503):
            body = json.dumps(wire_formats()[name].error_body(status, "the message", code))
            assert "the message" in body and code in body
            assert "allow" not in body and "action" not in body


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Hi", "allow"), (f"Take {WORD}.", "violation"), (CANNOT_BE_JUDGED, "unjudged")],
)
@every_case
def test_an_answer_is_the_rule_s(client: Client, case: Case, text: str, expected: str) -> None:
    response = case.say(client, text)
    assert response.status_code == 200 or (response.status_code, expected) == (422, "unjudged")
    assert outcome(case, response) == expected
    read = readings(case.example.path, response.status_code, response.text)
    assert set(read) == {expected}


@every_case
def test_where_the_engine_fails_nothing_is_allowed(client: Client, case: Case) -> None:
    response = case.say(client, BREAKS)
    assert response.status_code == (200 if case.name == "stream" else 503)
    assert outcome(case, response) == "unjudged" and "the engine failed" in response.text


@every_whole_case
def test_beside_an_image_an_allow_is_unjudged(client: Client, case: Case) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
    for text, expected in ((WORD, "violation"), ("Look:", "unjudged")):
        message = {"role": "user", "content": [{"type": "text", "text": text}, image]}
        response = case.ask(client, [HI, message])
        assert outcome(case, response) == expected
        assert expected == "violation" or "an image" in response.text


MARK = "MARK"
# Of a valid body with the text MARK in it, what a broken or hostile client makes; and what is said.
BROKEN = {
    "no UTF-8": (lambda body: body.replace(b"MARK", b"\xff\xfe"), "not Unicode"),
    "a cut character": (lambda body: body.replace(b"MARK", "ü".encode()[:1]), "not Unicode"),
    "half a surrogate pair": (lambda body: body.replace(b"MARK", rb"\ud83d"), ""),
    "cut off": (lambda body: body[: len(body) // 2], "not JSON"),
    "two values": (lambda body: body + body, ""),
    "a comma too many": (lambda body: body.partition(b"\n")[0][:-1] + b",}", "not JSON"),
    "no number": (lambda body: body.replace(b'"MARK"', b"NaN"), ""),
    "too many digits": (lambda body: body.replace(b'"MARK"', b"9" * 5000), "too many digits"),
    "a control character": (lambda body: body.replace(b"MARK", b"\x00"), "not JSON"),
    "nested": (lambda body: body.replace(b'"MARK"', b"[" * 100_000), "nested too deeply"),
    "a key twice": (lambda body: b'{"twice": 1, "twice": 1, ' + body[1:], "'twice' stands twice"),
}


@every_case
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_body_is_refused(client: Client, case: Case, fault: str) -> None:
    *before, last = case.requests([{"role": "user", "content": MARK}])
    for request in before:
        request.send(client)
    break_it, said = BROKEN[fault]
    response = last.send_content(client, break_it(last.content))
    if case.name == "stream" and fault == "two values":  # whose first line is whole
        assert outcome(case, response) != "allow"
        return
    assert response.status_code in (400, 422), response.text
    assert isinstance(response.json(), dict) and said in response.text


@every_case
def test_an_unknown_key_with_words_is_never_allowed(client: Client, case: Case) -> None:
    *before, whole = case.requests([HI])
    for request in before:
        request.send(client)
    first, *lines = whole.bodies
    hidden = WireRequest(whole.path, (first | {"documents": [WORD]}, *lines), whole.headers)
    assert outcome(case, hidden.send(client)) != "allow"


@every_case
def test_a_packed_body_is_unpacked_or_refused(client: Client, case: Case) -> None:
    *before, last = case.requests([{"role": "user", "content": "Hi"}])
    for request in before:
        request.send(client)
    packed = gzip.compress(last.content)
    assert outcome(case, last.send_content(client, packed, content_encoding="gzip")) == "allow"
    for header, value in (("content_encoding", "br"), ("content_type", "a/b; charset=utf-16")):
        response = last.send(client, **{header: value})
        assert response.status_code == 415 and header.replace("_", "-") in response.text
        assert response.json().keys() == case.wire_format.error_body(415, "", "nan").keys()


@every_case
def test_without_a_tenant_s_key_or_beyond_its_limits_nothing_is_judged(case: Case) -> None:
    engine = ToyEngine({RULE: -2.0, "other": -2.0})
    rule_sets = {
        "support": replace(RuleSet.any_of([RULE]), name="support"),
        "strict": replace(RuleSet.any_of(["other"]), name="strict"),
    }
    app = create_app(engine, rule_sets=rule_sets, tenants=shop_and_bank())  # type: ignore[arg-type]
    said = case.wire_format.error_body(401, "", "nan").keys()
    *_, request = case.requests([HI])
    with serving(app) as client:
        for key, status in (({}, 401), ({"x-api-key": "guess"}, 401), (HEADERS["admin"], 403)):
            refused = client.post(
                request.path, content=request.content, headers={**request.headers, **key}
            )
            assert refused.status_code == status and refused.json().keys() == said
            assert refused.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
        shop = HEADERS["shop"]
        large = request.send_content(client, request.content.ljust(2001), **shop)
        assert large.status_code == 413 and "2,000 bytes" in large.text
        long = case.say(client, "x" * 120, **HEADERS["bank"])
        assert long.status_code == 413 and "your limit is 100" in long.text
        other = request.renamed("other")
        if other != request:  # the format names a rule
            assert outcome(request, other.send(client, **shop)) == "unjudged"
        # A reply's conversation was judged.
        assert len(engine.conversations) == (case.before is not None)
        if case.before is not None:  # of another tenant's conversation
            before, reply = case.requests([HI])
            assert outcome(before, before.send(client, **shop)) == "allow"
            stranger = reply.send(client, **HEADERS["bank"])
            assert stranger.status_code == 422 and outcome(reply, stranger) == "unjudged"
        assert outcome(case, case.ask(client, [HI], **shop)) == "allow"


@every_case
def test_every_error_before_a_route_is_in_the_words_of_the_format(
    client: Client, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = case.wire_format.error_body(503, "", "nan").keys()
    assert client.get(case.example.path).json().keys() == said
    monkeypatch.setattr("serve.api.input.limits.MAX_REQUESTS", 0)
    monkeypatch.setattr("serve.api.input.limits.MAX_STREAMS", 0)
    full = case.say(client, "Hi")
    assert full.status_code == 503 and full.json().keys() == said
    assert full.headers["retry-after"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize(("threshold", "expected"), [(0.25, "violation"), (0.99, "allow")])
def test_the_real_engine_answers(
    monkeypatch: pytest.MonkeyPatch, threshold: float, expected: str
) -> None:
    """Random adapters say about a half to everything."""
    served = guard_engine()._rules._served
    card = served[RULE].card.model_copy(update={"threshold": threshold})
    monkeypatch.setitem(served, RULE, replace(served[RULE], card=card))
    with serving(create_app(guard_engine())) as client:
        for case in CASES:
            if case.before is not None and expected == "violation":  # which has no reply
                continue
            assert outcome(case, case.say(client, "Call me at 555 0100.")) == expected, case


@pytest.mark.slow
def test_on_the_real_engine_a_conversation_of_32_000_tokens_is_unjudged() -> None:
    with serving(create_app(guard_engine())) as client:
        for case in (case for case in CASES if case.before is None):
            response = case.say(client, "word " * 32_000)
            assert outcome(case, response) == "unjudged", case
            assert "fit" in response.text or "more than" in response.text


def relayed(request: WireRequest) -> RelayedRequest:
    headers = [(name.encode(), value.encode()) for name, value in request.headers.items()]
    return RelayedRequest(
        "POST", request.path, b"", tuple(headers), json.dumps(request.bodies[0]).encode()
    )


SYSTEM = {"role": "system", "content": "You sell shoes."}
GROWN = [SYSTEM, HI, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "?"}]
OTHERS = [SYSTEM, {"role": "user", "content": "My knee hurts."}]


@every_case
def test_a_conversation_keeps_its_session_while_it_grows_and_others_have_others(case: Case) -> None:
    keys = SessionKeys()

    def key(messages: list[dict[str, str]]) -> str:
        for request in case.requests(messages):
            last = keys.key(relayed(request))
        return last

    assert key(OTHERS) == key(OTHERS) != key(GROWN[:3])
    if case.has_messages:  # every format's is the same, so all find one replica
        whole = CASES[0].requests(GROWN)[0]
        assert key([*GROWN, HI]) == key([*GROWN[:2], HI]) == SessionKeys().key(relayed(whole))


def test_a_cluster_of_two_shards_answers_every_format_as_one_server(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, SIX_RULES, shards=2)
    one_server = create_app(WordsEngine(cluster.folders))
    with cluster.client() as client, serving(one_server) as alone:
        for case in CASES:
            for text in ("Hello.", f"This {VIOLATES}."):
                answers = []
                for server in (client, alone):
                    for request in case.requests([HI, {"role": "user", "content": text}]):
                        response = request.renamed(rules_on(1)[0]).send(server)
                    read = readings(case.example.path, response.status_code, response.text)
                    answers.append((response.status_code, read))
                assert answers[0] == answers[1], case
                assert answers[0][1][0] == ("violation" if VIOLATES in text else "allow"), case
        for pool in cluster.pools:
            pool.replicas = []
        for case in CASES:
            *_, request = case.requests([HI])
            lost = request.renamed(rules_on(1)[0]).send(client)
            assert outcome(case, lost) == "unjudged", case
            if case.name != "stream" and case.before is None:
                assert lost.status_code == 503, case
                assert lost.json().keys() == case.wire_format.error_body(503, "", "nan").keys()


def test_no_two_formats_answer_the_same_path_and_every_route_is_described() -> None:
    described: dict[str, Any] = create_app(ToyEngine()).openapi()["paths"]  # type: ignore[arg-type]
    paths = [route.path for one in wire_formats().values() for route in one.router.routes]
    others = {"/health", "/healthz", "/readyz", "/metrics", "/admin/rules/{rule}"}
    assert len(paths) == len(set(paths)) and not others & set(paths)
    assert set(described) == {*paths} | others


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
# What carries words under a key that no rule reads: of a message, or of its text;
# tests/guard/conversation/test_chat.py has all kinds.
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
            {"type": "text", "text": "Hello.", "thought_signature": "Zm9v", "reasoning": "a"}
        ]
    },
    {"tool_name": "pay", "call_id": "call_1", "user": "7", "encrypted_content": "Zm9v="},
    {"usage": {"input_tokens": 5, "service_tier": "standard"}, "index": 1, "timestamp": 1.5},
    # What says nothing, under whatever key.
    {"prefix": True, "images": [], "weight": 1, "x": "", "y": {"a": 1}, "z": [1, None]},
]


@pytest.mark.parametrize("said", SILENT)
@every_whole_case
def test_a_turn_that_says_nothing_is_an_empty_turn_and_alone_is_not_judged(
    engine: WordEngine, client: Client, case: Case, said: dict[str, Any]
) -> None:
    messages = [HI, {"role": "assistant", **said}]
    assert outcome(case, case.ask(client, messages)) == "allow"
    user, silent = engine.conversations[-1][:2]
    assert user == Message("user", "Hi") and type(silent) is Message
    assert silent.role == "assistant" and not silent.content.strip(" \n\u200b")
    assert conversation_of({"messages": messages}) == (user, silent)
    asked = len(engine.conversations)
    messages = [{"role": "user", **said}, {"role": "assistant", **said}]
    assert outcome(case, case.ask(client, messages)) == "unjudged"
    assert len(engine.conversations) == asked
    with pytest.raises(GuardError, match="the conversation is empty"):
        conversation_of({"messages": messages})


@pytest.mark.parametrize("text", ["", " \n", "\u200b"])
def test_a_text_that_says_nothing_is_not_judged(client: Client, text: str) -> None:
    parts = [{"type": "text", "text": text}]
    for path, body in (
        (MODERATIONS, {"input": text}),
        (MODERATIONS, {"input": ["Hi", text]}),
        (MODERATIONS, {"input": parts}),
        (f"/{RULE}/api/v1/text/contents", {"contents": [text]}),
    ):
        request = WireRequest(path, (body,), {})
        assert outcome(request, request.send(client)) == "unjudged"


@pytest.mark.parametrize("hidden", HIDDEN)
@every_whole_case
def test_words_that_no_rule_reads_are_unjudged(
    client: Client, case: Case, hidden: dict[str, Any]
) -> None:
    for messages in ([HI, REPLY | hidden], [HI | hidden, REPLY]):
        assert outcome(case, case.ask(client, messages)) == "unjudged"
    stored = conversation_of({"messages": [HI, REPLY | hidden]})[-1]
    assert isinstance(stored, PartlyRead) and "message 1 has the key" in stored.unread[0]


@every_whole_case
def test_beside_hidden_words_a_violation_is_one(client: Client, case: Case) -> None:
    """Our own formats refuse unknown keys."""
    response = case.ask(client, [HI, REPLY | {"content": WORD, "parts": ["Hi"]}])
    is_refused = response.status_code == 422 and "parts" in response.text
    assert is_refused or outcome(case, response) == "violation"


@pytest.mark.parametrize("ordinary", ORDINARY)
@every_whole_case
def test_what_clients_have_beside_a_text_changes_nothing(
    engine: WordEngine, client: Client, case: Case, ordinary: dict[str, Any]
) -> None:
    assert outcome(case, case.ask(client, [HI, REPLY | ordinary])) == "allow"
    assert engine.conversations[-1][:2] == (Message("user", "Hi"), Message("assistant", "Hello."))


CALL = {"id": "1", "type": "function", "function": {"name": "pay", "arguments": "{}"}}
CHATS, MODERATIONS = "/v1/chat/completions", "/v1/moderations"
DETECTORS = f"/{RULE}/api/v1/text/chat"
TEXTS = {"input_type": "request", "texts": ["Hi"]}
CHAT = {"input_type": "request", "structured_messages": [HI]}
# Beside the conversation, or in a text's part, stand words that no rule reads.
BESIDE: list[tuple[str, dict[str, Any]]] = [
    (CHATS, {"messages": [HI], "response_format": {"type": "text", "x": WORD}}),
    (CHATS, {"messages": [HI], "tools": [{"function": {"x": WORD}}]}),
    (CHATS, {"messages": [HI], "functions": [{"description": WORD}]}),
    (DETECTORS, {"messages": [HI], "tools": [{"function": {"description": WORD}}]}),
    (MODERATIONS, {"input": [{"type": "text", "text": "Hi", "x": WORD}]}),
    (LITELLM, CHAT | {"texts": ["Hi", WORD]}),
    (LITELLM, TEXTS | {"request_data": {"text": WORD}}),
    (LITELLM, TEXTS | {"usage": {"t": WORD}}),
    (LITELLM, TEXTS | {"litellm_trace_id": SENTENCE}),
    (LITELLM, CHAT | {"tool_calls": [{"function": {"name": "pay", "arguments": WORD}}]}),
    (LITELLM, CHAT | {"images": ["data:"]}),
    ("/request", {"body": {"messages": [HI], "system": WORD}}),
]


@pytest.mark.parametrize("key", ["id", "index", "type", "extra_content"])
@every_whole_case
def test_a_call_s_id_is_left_out_and_a_sentence_in_its_place_is_read(
    engine: WordEngine, client: Client, case: Case, key: str
) -> None:
    messages = [HI, {"role": "assistant", "tool_calls": [CALL | {key: SENTENCE}]}]
    expected = "allow" if key == "extra_content" else "violation"
    assert outcome(case, case.ask(client, messages)) == expected
    case.ask(client, [HI, {"role": "assistant", "tool_calls": [CALL]}])
    assert engine.conversations[-1][1].content == '{"name": "pay", "arguments": {}}'


@pytest.mark.parametrize(("path", "body"), BESIDE)
def test_words_beside_it_are_never_allowed(client: Client, path: str, body: dict[str, Any]) -> None:
    named = {"model": RULE} if path in (CHATS, MODERATIONS) else {}
    request = WireRequest(path, (body | named,), {})
    assert outcome(request, request.send(client)) != "allow"


@pytest.mark.parametrize("beside", [{"text": WORD}, {"delta": {"content": WORD}}])
def test_words_beside_a_choice_are_refused(client: Client, beside: dict[str, Any]) -> None:
    (case,) = [case for case in WHOLE if case.example.path == "/response"]
    prompt, reply = case.requests([HI, REPLY])
    prompt.send(client)
    whole = {"index": 0, "finish_reason": "stop", "logprobs": {"content": []}, "message": REPLY}
    for choice, expected in ((whole, "allow"), (whole | beside, "unjudged")):
        sent = WireRequest(reply.path, ({"body": {"choices": [choice]}},), reply.headers)
        assert outcome(sent, sent.send(client)) == expected


def test_a_chat_s_own_texts_images_and_calls_beside_it_change_nothing(client: Client) -> None:
    reordered = {"index": 0, "function": {"arguments": "{}", "name": "pay"}, "id": "1"}
    text = {"type": "text", "text": "Two\n\nlines."}
    messages = [{"role": "user", "content": [text]}, {"role": "assistant", "tool_calls": [CALL]}]
    beside = {"texts": [text["text"], "", "Two\n\nli"], "usage": {"prompt_tokens": 5}}
    body = CHAT | beside | {"structured_messages": messages, "tool_calls": [reordered]}
    request = WireRequest(LITELLM, (body,), {})
    assert outcome(request, request.send(client)) == "allow"
