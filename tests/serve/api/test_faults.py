"""What a caller may break: no format crashes, and none reads as an allow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve.api.app import create_app
from tests.serve.allows import allows
from tests.serve.fuzz.never_allows import NeverAllows
from tests.serve.guarded import guard_engine
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine

JSON = {"content-type": "application/json", "detector-id": "always", "call-id": "1"}


def bodies(text: str, rule: str) -> dict[str, dict[str, Any]]:
    """A valid body for every path that judges, each with this text in it."""
    messages = [{"role": "user", "content": text}]
    return {
        "/v1/check": {"messages": messages, "rules": [rule]},
        "/v1/check/turns": {"messages": messages, "rules": [rule]},
        "/v1/chat/completions": {"messages": messages, "model": rule},
        "/v1/moderations": {"input": text, "model": rule},
        "/api/v1/text/contents": {"contents": [text]},
        "/api/v1/text/chat": {"messages": messages},
        "/api/v1/text/generation": {"prompt": text, "generated_text": "Yes."},
        "/api/v1/text/context/doc": {"content": text, "context_type": "docs", "context": ["A."]},
        "/beta/litellm_basic_guardrail_api": {
            "input_type": "request",
            "structured_messages": messages,
            "additional_provider_specific_params": {"rules": [rule]},
        },
        "/request": {"body": {"messages": messages}},
        "/response": {"body": {"choices": [{"message": {"role": "assistant", "content": text}}]}},
    }


PATHS = list(bodies("", ""))
# Of a valid body with the text MARK in it, what a broken or hostile client makes.
MARK = "MARK"
BROKEN = {
    "no UTF-8": lambda body: body.replace(b"MARK", b"\xff\xfe"),
    "a cut character": lambda body: body.replace(b"MARK", "ü".encode()[:1]),
    "half a surrogate pair": lambda body: body.replace(b"MARK", rb"\ud83d"),
    "cut off": lambda body: body[: len(body) // 2],
    "two values": lambda body: body + body,
    "a comma too many": lambda body: body[:-1] + b",}",
    "no number": lambda body: body.replace(b'"MARK"', b"NaN"),
    "a number without end": lambda body: body.replace(b'"MARK"', b"9" * 5000),
    "a control character": lambda body: body.replace(b"MARK", b"\x00"),
    "nested": lambda body: body.replace(b'"MARK"', b"[" * 100_000),
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A server without an allow to give, and whose "always" is always violated."""
    with serving(create_app(NeverAllows())) as client:  # type: ignore[arg-type]
        yield client


def ask(client: httpx.Client, path: str, content: bytes, rule: str = "always") -> httpx.Response:
    headers = JSON | {"detector-id": rule, "guard-rules": rule}
    return client.post(path, content=content, headers=headers)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_body_is_refused_in_every_format(
    client: httpx.Client, path: str, fault: str
) -> None:
    whole = json.dumps(bodies(MARK, "always")[path]).encode()
    response = ask(client, path, BROKEN[fault](whole))
    assert response.status_code in (400, 422), response.text
    assert isinstance(response.json(), dict)


@pytest.mark.parametrize("path", PATHS)
def test_what_reads_as_an_allow_is_told_from_what_does_not(path: str) -> None:
    for engine, is_allowed in ((NeverAllows(), False), (ToyEngine({"always": -5.0}), True)):
        with serving(create_app(engine)) as client:  # type: ignore[arg-type]
            if path == "/response":  # whose conversation is this
                ask(client, "/request", json.dumps(bodies("Hi", "always")["/request"]).encode())
            response = ask(client, path, json.dumps(bodies("Hi", "always")[path]).encode())
        if path == "/response" and not is_allowed:  # the request was refused, and has no reply
            assert response.status_code == 422
        else:
            assert response.is_success
        assert allows(path, response.status_code, response.text) == is_allowed


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in PATHS if path != "/response"])
def test_a_conversation_of_32_000_tokens_is_unjudged_in_every_format(path: str) -> None:
    content = json.dumps(bodies("word " * 32_000, "plain")[path]).encode()
    with serving(create_app(guard_engine())) as client:
        response = ask(client, path, content, "plain")
        assert response.status_code in (200, 422)
        assert not allows(path, response.status_code, response.text)
        assert "fit" in response.text or "more than" in response.text
        assert ask(client, "/v1/check", json.dumps(bodies("Hi", "plain")["/v1/check"]).encode())
