"""Every error in the words of the wire format that was called, and none of them a verdict."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from guard.errors import GuardError
from serve.api.app import FORMATS, create_app
from serve.engine.codes import Code
from serve.engine.refusals import Overloaded, TooLate
from tests.serve.serving import MESSAGES, serving
from tests.serve.toy_engine import ToyEngine


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(create_app(ToyEngine())) as client:  # type: ignore[arg-type]
        yield client


@pytest.mark.parametrize(
    ("content", "kind", "error"),
    [
        (
            '{"messages": oops}',
            "application/json",
            "the body is not JSON: Expecting value at character 13",
        ),
        (
            '{"messages": "a\tb"}',
            "application/json",
            "the body is not JSON: Invalid control character at character 15",
        ),
        (
            '{"messages": []}',
            "text/plain",
            "the body must be a JSON object, sent with `content-type: application/json`",
        ),
        ("[]", "application/json", "the body must be a JSON object"),
        ("", "application/json", "the body must be a JSON object"),
    ],
)
def test_a_body_that_is_no_json_object_is_told_so(
    client: httpx.Client, content: str, kind: str, error: str
) -> None:
    response = client.post("/v1/check", content=content, headers={"content-type": kind})
    assert response.status_code == 422
    assert response.json()["verdict"] == "unjudged" and response.json()["error"].startswith(error)


def test_of_many_things_that_are_wrong_the_first_are_named_and_the_others_counted(
    client: httpx.Client,
) -> None:
    """Of a list the first wrong item alone: looking at all of them takes long."""
    wrong = {"messages": [{"role": "root", "content": "Hi"}] * 20, "rules": {}, "rule_set": []}
    body = wrong | {"metadata": [], "explain": "?", "cache_salt": []}
    error = client.post("/v1/check", json=body).json()["error"]
    named = [problem.split(":")[0] for problem in error.split("; ")[:5]]
    assert set(named) < set(body) | {"messages.0.role"} and "messages.0.role" in named
    assert error.endswith("; and 1 more")


@pytest.mark.parametrize("path", ["/v1/check", "/v1/chat/completions"])
def test_a_key_that_is_no_unicode_text_is_refused_and_no_crash(
    client: httpx.Client, path: str
) -> None:
    kind = {"content-type": "application/json"}
    body = '{"model": "fine", "messages": [{"role": "user", "content": "Hi"}], "\\ud800": 1}'
    assert client.post(path, content=body, headers=kind).status_code in (400, 422)


def test_a_wrong_method_or_path_has_no_verdict_and_says_where_calls_are_described(
    client: httpx.Client,
) -> None:
    wrong = client.get("/v1/check")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "OPTIONS, POST")
    assert wrong.json() == {
        "verdict": "unjudged",
        "code": "request_refused",
        "error": "Method Not Allowed; GET /docs describes the calls",
    }
    assert client.get("/v1/checks").status_code == 404


def test_an_error_that_nobody_expected_is_unjudged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ToyEngine()
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        monkeypatch.setattr("serve.api.formats.check.CheckResponse.of", lambda _: 1 / 0)
        body = {"messages": MESSAGES, "rules": ["fine"]}
        response = client.post("/v1/check", json=body, headers={"x-request-id": "a3f9"})
        assert (response.status_code, response.json()["verdict"]) == (500, "unjudged")
        assert response.headers["x-request-id"] == "a3f9"


def test_a_failing_engine_is_a_503_without_a_verdict_and_without_internals() -> None:
    with serving(create_app(ToyEngine())) as client:  # type: ignore[arg-type]
        response = client.post("/v1/check", json={"messages": MESSAGES, "rules": ["crash"]})
        assert response.status_code == 503
        assert response.json()["verdict"] == "unjudged"
        assert response.json()["error"] == "the engine failed; the server's log says why"
        assert "retry-after" not in response.headers
        assert (
            client.post("/v1/check", json={"messages": MESSAGES, "rules": ["fine"]}).status_code
            == 200
        )


@pytest.mark.parametrize(("kind", "stated"), [(Overloaded, "3"), (TooLate, None)])
def test_who_is_refused_for_want_of_room_and_nobody_else_is_told_when_there_may_be_some(
    monkeypatch: pytest.MonkeyPatch, kind: type[Overloaded], stated: str | None
) -> None:
    def refuse(*_: object, **__: object) -> None:
        refused = kind("too much waits")
        refused.retry_after_s = 2.3
        raise refused

    monkeypatch.setattr("serve.engine.thread.engine_thread.EngineThread.check", refuse)
    with serving(create_app(ToyEngine())) as client:  # type: ignore[arg-type]
        response = client.post("/v1/check", json={"messages": MESSAGES, "rules": ["fine"]})
    assert response.status_code == 503 and response.headers.get("retry-after") == stated
    assert (response.headers.get("x-should-retry") == "false") is (stated is None)


def test_a_failure_that_nobody_has_logged_is_logged_and_not_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise GuardError("no such file", where="/etc/weights/rule")

    engine = ToyEngine()
    monkeypatch.setattr(engine, "open_check", fail)
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        response = client.post("/v1/check", json={"messages": MESSAGES, "rules": ["fine"]})
    assert response.status_code == 503 and "weights" not in response.text
    assert "no such file" in caplog.text


def test_a_body_nested_without_end_is_refused_and_no_crash(client: httpx.Client) -> None:
    kind = {"content-type": "application/json"}
    body = f'{{"messages": {"[" * 200_000}'
    for path in ("/v1/check", "/v1/moderations", "/request"):
        assert client.post(path, content=body, headers=kind).status_code in (400, 422)


def test_tools_nested_about_as_deeply_as_can_be_read_are_refused_and_no_crash(
    client: httpx.Client,
) -> None:
    kind, messages = {"content-type": "application/json"}, json.dumps(MESSAGES)
    deepest = sys.getrecursionlimit()
    errors = []
    for depth in range(deepest - 150, deepest):
        tools = f'[{{"parameters": {"[" * depth}{"]" * depth}}}]'
        body = f'{{"messages": {messages}, "rules": ["fine"], "tools": {tools}}}'
        response = client.post("/v1/check", content=body, headers=kind)
        assert response.status_code in (200, 400, 422), response.text
        errors.append(response.json().get("error", ""))
    assert any("nested too deeply" in error for error in errors)


class ToyBody(BaseModel):
    fails: str


@pytest.fixture
def toy_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A client of an app with another format, whose one route fails as it is asked to."""
    router = APIRouter()

    @router.post("/toy/{rule}")
    async def toy(rule: str, body: ToyBody, request: Request) -> dict[str, bool]:
        raise {
            "unknown rule": HTTPException(404, f"no rule {rule}"),
            "engine": GuardError("the file is gone", where="runs/tiny"),
            "bug": ZeroDivisionError(),
        }[body.fails]

    def error_body(status: int, message: str, code: Code) -> dict[str, Any]:
        return {"code": status, "message": message}

    toy_format = SimpleNamespace(router=router, error_body=error_body, MALFORMED=422)
    monkeypatch.setitem(FORMATS, "toy", toy_format)  # type: ignore[arg-type]
    with serving(create_app(ToyEngine())) as client:  # type: ignore[arg-type]
        yield client


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({"fails": "unknown rule"}, 404, "no rule pii"),
        ({"fails": "engine"}, 503, "the engine failed; the server's log says why"),
        ({"fails": "bug"}, 500, "the server failed"),
        ({}, 422, "fails: Field required"),
    ],
)
def test_a_format_says_every_error_in_its_own_body(
    toy_client: httpx.Client, body: dict[str, str], code: int, message: str
) -> None:
    response = toy_client.post("/toy/pii", json=body)
    assert response.status_code == code
    assert set(response.json()) == {"code", "message"} and response.json()["code"] == code
    assert message in response.json()["message"]


def test_what_never_reaches_a_route_is_said_in_the_format_of_its_path(
    toy_client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert toy_client.get("/toy/pii").json()["code"] == 405
    monkeypatch.setattr("serve.api.input.limits.MAX_REQUESTS", 0)
    assert toy_client.post("/toy/pii", json={}).json()["code"] == 503
    assert toy_client.post("/v1/check", json={}).json()["verdict"] == "unjudged"
    monkeypatch.undo()
    assert toy_client.post("/v1/check", json={}).json()["verdict"] == "unjudged"
    assert toy_client.post("/nowhere", json={}).json()["verdict"] == "unjudged"
