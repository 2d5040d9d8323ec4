"""The contract of every wire format, by the examples that it states: who may ask, what is refused,
how a client reads what comes back, how it reads messages, as stored rows are read too, and the same
from a cluster.

A format that is added to the table is asked here too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from httpx import Client

from guard.conversation.example import Message
from guard.conversation.row import conversation_of
from guard.errors import GuardError
from serve.api.app import create_app
from serve.api.formats.litellm import PATH as LITELLM
from serve.api.formats.table import WIRE_FORMATS
from serve.api.wire_format import RULE
from serve.cluster.front.session import SessionKeys
from serve.cluster.messages import RelayedRequest
from serve.engine.codes import Code
from serve.policy.rule_set import RuleSet
from tests.serve.api.tenants import HEADERS, shop_and_bank
from tests.serve.cluster.words_cluster import RULES, LocalCluster
from tests.serve.cluster.words_engine import VIOLATES, WordsEngine
from tests.serve.guarded import guard_engine
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine
from tests.serve.wire_requests import CASES, HI, WHOLE, Case, WireRequest, outcome, readings
from tests.serve.word_engine import BREAKS, CANNOT_BE_JUDGED, WORDS, WordEngine

WORD = WORDS[RULE]
SENTENCE = f"Take {WORD}."
REPLY = {"role": "assistant", "content": "Hello."}
CALL = {"id": "1", "type": "function", "function": {"name": "pay", "arguments": "{}"}}
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_whole_case = pytest.mark.parametrize("case", WHOLE, ids=str)
every_format = pytest.mark.parametrize("name", WIRE_FORMATS)


@pytest.fixture(scope="module")
def engine() -> WordEngine:
    return WordEngine()


@pytest.fixture(scope="module")
def client(engine: WordEngine) -> Iterator[Client]:
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        yield client


def test_a_format_has_examples_on_paths_of_its_own_and_every_route_is_described() -> None:
    paths: list[str] = []
    for name, stated in WIRE_FORMATS.items():
        assert stated.requests and bool(stated.replies) == bool(stated.call_id), name
        for example in (*stated.requests, *stated.replies):
            assert stated.has_path(example.path), example
        paths += [route.path for route in stated.router.routes]  # type: ignore[attr-defined]
    own = {"/healthz", "/readyz", "/metrics", "/admin/rules", "/admin/rules/{rule}"}
    own |= {f"/admin/rules/{{rule}}/{decision}" for decision in ("publish", "rollback", "mode")}
    own |= {"/v1/feedback", "/admin/reviews", "/admin/reviews/{conversation}"}
    described: dict[str, Any] = create_app(ToyEngine()).openapi()["paths"]  # type: ignore[arg-type]
    assert len(paths) == len(set(paths)) and not own & set(paths)
    assert set(described) == {*paths} | own


@every_format
def test_an_error_says_what_and_why_and_nothing_that_reads_as_a_verdict(name: str) -> None:
    for code in get_args(Code):
        body = json.dumps(WIRE_FORMATS[name].error_body(503, "the message", code))
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
def test_where_the_engine_fails_or_there_is_no_room_nothing_is_allowed(
    client: Client, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = case.say(client, BREAKS)
    assert response.status_code == (200 if case.name == "stream" else 503)
    assert outcome(case, response) == "unjudged" and "the engine failed" in response.text
    said = case.wire_format.error_body(503, "", "nan").keys()
    wrong_method = client.get(case.example.path)
    assert wrong_method.json().keys() == said and "GET /docs describes" in wrong_method.text
    monkeypatch.setattr("serve.api.input.limits.MAX_REQUESTS", 0)
    monkeypatch.setattr("serve.api.input.limits.MAX_STREAMS", 0)
    full = case.say(client, "Hi")
    assert full.status_code == 503 and full.json().keys() == said
    assert full.headers["retry-after"] == "1"


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
    "no number": (lambda body: body.replace(b'"MARK"', b"NaN"), ""),
    "too many digits": (lambda body: body.replace(b'"MARK"', b"9" * 5000), "too many digits"),
    "nested": (lambda body: body.replace(b'"MARK"', b"[" * 100_000), "nested too deeply"),
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


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value, at any depth."""
    if isinstance(value, dict):
        yield value
    inner = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for element in inner:
            yield from objects(element)


def hiding(request: WireRequest) -> Iterator[bytes]:
    """What the request sends, with the word in any of its objects: under a key that is unknown or
    has no words, or once more under one that stands there, as the first or as the last.
    """
    bodies: list[dict[str, Any]] = json.loads(json.dumps(request.bodies))
    for found in list(objects(bodies)):
        whole = dict(found)
        for key in ("documents", "Content", "usage", *whole):
            for fields in ({MARK: 0} | whole, whole | {MARK: 0}):
                found.clear()
                found.update(fields)
                content = "\n".join(map(json.dumps, bodies))
                hidden = f"{json.dumps(key)}: {json.dumps(WORD)}"
                yield content.replace(f'"{MARK}": 0', hidden).encode()
        found.clear()
        found.update(whole)


@every_case
def test_no_word_is_hidden_under_an_unknown_key_or_one_that_stands_twice(
    client: Client, case: Case
) -> None:
    text = {"role": "assistant", "content": [{"type": "text", "text": "Hi"}], "tool_calls": [CALL]}
    messages = [HI, text] if case.has_messages else [HI]
    *before, last = case.requests(messages)
    for request in before:
        request.send(client)
    assert outcome(case, last.send(client)) == "allow"
    for content in hiding(last):
        assert outcome(case, last.send_content(client, content)) != "allow", content
    if case.has_messages:  # beside hidden words a violation is one; our own formats refuse them
        response = case.ask(client, [HI, REPLY | {"content": WORD, "parts": ["Hi"]}])
        is_refused = response.status_code == 422 and "parts" in response.text
        assert is_refused or outcome(case, response) == "violation"


@every_case
def test_a_packed_body_or_one_of_another_charset_is_refused(client: Client, case: Case) -> None:
    *before, last = case.requests([{"role": "user", "content": "Hi"}])
    for request in before:
        request.send(client)
    for header, value in (("content_encoding", "gzip"), ("content_type", "a/b; charset=utf-16")):
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
        for key, status in (({}, 401), ({"x-api-key": "guess"}, 401), (HEADERS["viewer"], 403)):
            refused = client.post(request.path, content=request.content, headers=key)
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


@pytest.mark.slow
def test_the_real_engine_answers_and_32_000_tokens_are_unjudged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random adapters say about a half to everything."""
    served = guard_engine()._rules._served
    for threshold, expected in ((0.25, "violation"), (0.99, "allow")):
        card = served[RULE].card.model_copy(update={"threshold": threshold})
        monkeypatch.setitem(served, RULE, replace(served[RULE], card=card))
        with serving(create_app(guard_engine())) as client:
            for case in CASES:
                if case.before is None or expected == "allow":  # a violation has no reply
                    assert outcome(case, case.say(client, "Call me at 555 0100.")) == expected, case
                if case.before is None:
                    long = case.say(client, "word " * 32_000)
                    assert outcome(case, long) == "unjudged", case
                    assert "fit" in long.text or "more than" in long.text


def relayed(request: WireRequest) -> RelayedRequest:
    return RelayedRequest("POST", request.path, b"", (), json.dumps(request.bodies[0]).encode())


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


def test_a_cluster_answers_every_format_as_one_server(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    one_server = create_app(WordsEngine(cluster.folders))
    with cluster.client() as client, serving(one_server) as alone:
        for case in CASES:
            for text in ("Hello.", f"This {VIOLATES}."):
                answers = []
                for server in (client, alone):
                    for request in case.requests([HI, {"role": "user", "content": text}]):
                        response = request.renamed(RULES[0]).send(server)
                    read = readings(case.example.path, response.status_code, response.text)
                    answers.append((response.status_code, read))
                assert answers[0] == answers[1], case
                assert answers[0][1][0] == ("violation" if VIOLATES in text else "allow"), case


# Ways to say nothing.
SILENT: list[dict[str, Any]] = [
    {},
    {"content": "\u200b"},
    {"content": [{"type": "text", "text": " \n"}]},
    {"content": None, "refusal": None, "tool_calls": [], "function_call": None, "audio": None},
    {"content": [{"type": "thinking", "thinking": "I should say ibuprofen.", "signature": "x"}]},
]
# What ordinary clients and gateways have beside a message's text.
ORDINARY: list[dict[str, Any]] = [
    {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
    {"reasoning_content": "Hm.", "provider_specific_fields": {"refusal": None}},
    {"usage": {"input_tokens": 5}, "index": 1, "cache_control": {"type": "ephemeral"}},
    {"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Hello."}]},
    # What says nothing, under whatever key.
    {"prefix": True, "images": [], "weight": 1, "x": "", "y": {"a": 1}, "z": [1, None]},
]


@every_whole_case
def test_a_turn_that_says_nothing_is_an_empty_turn_and_alone_is_not_judged(
    engine: WordEngine, client: Client, case: Case
) -> None:
    for said in SILENT:
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


@every_whole_case
def test_what_clients_have_beside_a_text_changes_nothing(
    engine: WordEngine, client: Client, case: Case
) -> None:
    plain = (Message("user", "Hi"), Message("assistant", "Hello."))
    for ordinary in ORDINARY:
        assert outcome(case, case.ask(client, [HI, REPLY | ordinary])) == "allow", ordinary
        assert engine.conversations[-1][:2] == plain


CHATS = "/v1/chat/completions"
TEXTS = {"input_type": "request", "texts": ["Hi"]}
CHAT = {"input_type": "request", "structured_messages": [HI]}
# Beside the conversation, or in a text's part, stand words that no rule reads.
BESIDE: list[tuple[str, dict[str, Any]]] = [
    (CHATS, {"model": RULE, "messages": [HI], "response_format": {"type": "text", "x": WORD}}),
    (CHATS, {"model": RULE, "messages": [HI], "functions": [{"description": WORD}]}),
    ("/v1/moderations", {"model": RULE, "input": [{"type": "text", "text": "Hi", "x": WORD}]}),
    (LITELLM, CHAT | {"texts": ["Hi", WORD]}),
    (LITELLM, TEXTS | {"request_data": {"text": WORD}}),
    (LITELLM, TEXTS | {"litellm_trace_id": SENTENCE}),
    (LITELLM, CHAT | {"tool_calls": [{"function": {"name": "pay", "arguments": WORD}}]}),
    (LITELLM, CHAT | {"images": ["data:"]}),
]


@every_whole_case
def test_a_call_s_id_is_left_out_and_a_sentence_in_its_place_is_read(
    engine: WordEngine, client: Client, case: Case
) -> None:
    for key, expected in (("id", "violation"), ("type", "violation"), ("extra_content", "allow")):
        messages = [HI, {"role": "assistant", "tool_calls": [CALL | {key: SENTENCE}]}]
        assert outcome(case, case.ask(client, messages)) == expected
    case.ask(client, [HI, {"role": "assistant", "tool_calls": [CALL]}])
    assert engine.conversations[-1][1].content == '{"name": "pay", "arguments": {}}'


def test_words_beside_it_are_never_allowed(client: Client) -> None:
    for path, body in BESIDE:
        request = WireRequest(path, (body,))
        assert outcome(request, request.send(client)) != "allow", body


def test_a_chat_s_own_texts_images_and_calls_beside_it_change_nothing(client: Client) -> None:
    reordered = {"index": 0, "function": {"arguments": "{}", "name": "pay"}, "id": "1"}
    text = {"type": "text", "text": "Two\n\nlines."}
    messages = [{"role": "user", "content": [text]}, {"role": "assistant", "tool_calls": [CALL]}]
    beside = {"texts": [text["text"], "", "Two\n\nli"], "usage": {"prompt_tokens": 5}}
    body = CHAT | beside | {"structured_messages": messages, "tool_calls": [reordered]}
    request = WireRequest(LITELLM, (body,))
    assert outcome(request, request.send(client)) == "allow"
