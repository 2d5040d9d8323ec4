"""Every error in the words of the wire format that was called, and none of them a verdict."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
from httpx import Client

from guard.errors import GuardError
from serve.api.app import create_app
from serve.engine.refusals import Overloaded, TooLate
from tests.serve.serving import MESSAGES, serving
from tests.serve.toy_engine import ToyEngine

JSON = "application/json"
BODY = {"messages": MESSAGES, "rules": ["fine"]}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(create_app(ToyEngine())) as client:  # type: ignore[arg-type]
        yield client


NO_OBJECT = "the body must be a JSON object, sent with `content-type: application/json`"


@pytest.mark.parametrize(
    ("content", "kind", "error"),
    [
        ('{"messages": oops}', JSON, "the body is not JSON: Expecting value at character 13"),
        (
            '{"messages": "a\tb"}',
            JSON,
            "the body is not JSON: Invalid control character at character 15",
        ),
        ('{"messages": []}', "text/plain", NO_OBJECT),
        ("[]", JSON, NO_OBJECT),
        ("", JSON, NO_OBJECT),
    ],
)
def test_no_object_is_told_so(client: Client, content: str, kind: str, error: str) -> None:
    response = client.post("/v1/check", content=content, headers={"content-type": kind})
    assert response.status_code == 422
    assert response.json()["verdict"] == "unjudged" and response.json()["error"].startswith(error)


def test_of_many_faults_the_first_are_named_and_others_counted(client: Client) -> None:
    """Of a list the first wrong item alone: looking at all of them takes long."""
    wrong = {"messages": [{"role": "root", "content": "Hi"}] * 20, "rules": {}, "rule_set": []}
    body = wrong | {"metadata": [], "explain": "?", "cache_salt": []}
    error = client.post("/v1/check", json=body).json()["error"]
    named = [problem.split(":")[0] for problem in error.split("; ")[:5]]
    assert set(named) < set(body) | {"messages.0.role"} and "messages.0.role" in named
    assert error.endswith("; and 1 more")


def test_a_wrong_method_or_path_says_where_calls_are_described(client: Client) -> None:
    error = "Method Not Allowed; GET /docs describes the calls"
    wanted = {"verdict": "unjudged", "code": "request_refused", "error": error}
    assert client.get("/v1/check").json() == wanted
    assert client.get("/v1/checks").status_code == 404


def test_an_unexpected_error_is_unjudged(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.api.formats.check.CheckResponse.of", lambda _: 1 / 0)
    response = client.post("/v1/check", json=BODY, headers={"x-request-id": "a3f9"})
    assert (response.status_code, response.json()["verdict"]) == (500, "unjudged")
    assert response.headers["x-request-id"] == "a3f9"


@pytest.mark.parametrize(("kind", "stated"), [(Overloaded, "3"), (TooLate, None)])
def test_who_is_refused_for_want_of_room_and_nobody_else_is_told_when_there_may_be_some(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: type[Overloaded], stated: str | None
) -> None:
    def refuse(*_: object, **__: object) -> None:
        refused = kind("too much waits")
        refused.retry_after_s = 2.3
        raise refused

    monkeypatch.setattr("serve.engine.thread.engine_thread.EngineThread.check", refuse)
    response = client.post("/v1/check", json=BODY)
    assert response.status_code == 503 and response.headers.get("retry-after") == stated
    assert (response.headers.get("x-should-retry") == "false") is (stated is None)


def test_a_failure_that_nobody_has_logged_is_logged_and_not_told(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise GuardError("no such file", where="/etc/weights/rule")

    monkeypatch.setattr(ToyEngine, "open_check", fail)
    response = client.post("/v1/check", json=BODY)
    assert response.status_code == 503 and response.json()["verdict"] == "unjudged"
    assert response.json()["error"] == "the engine failed; the server's log says why"
    assert "retry-after" not in response.headers
    assert "no such file" in caplog.text


def test_tools_nested_as_deeply_as_can_be_read_are_refused_and_no_crash(client: Client) -> None:
    kind, messages = {"content-type": JSON}, json.dumps(MESSAGES)
    deepest = sys.getrecursionlimit()
    errors = []
    for depth in range(deepest - 150, deepest):
        tools = f'[{{"parameters": {"[" * depth}{"]" * depth}}}]'
        body = f'{{"messages": {messages}, "rules": ["fine"], "tools": {tools}}}'
        response = client.post("/v1/check", content=body, headers=kind)
        assert response.status_code in (200, 400, 422), response.text
        errors.append(response.json().get("error", ""))
    assert any("nested too deeply" in error for error in errors)
