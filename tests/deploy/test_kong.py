"""deploy/kong: its Lua runs, in the LuaJIT that Kong has, against the server; Kong is not here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve.api.app import create_app
from serve.api.input.limits import MAX_BYTES
from tests.deploy.clients import DEPLOY, addressed, output
from tests.serve.serving import serving
from tests.serve.word_engine import WordEngine

pytestmark = pytest.mark.slow

FOLDER = DEPLOY / "kong"
PROGRAM = Path(__file__).with_name("kong_lua.py")
SERVER = "http://localhost:8000"


def access_code() -> str:
    """What the one plugin of the file runs for a request."""
    content = yaml.safe_load((FOLDER / "pre-function.yaml").read_text(encoding="utf-8"))
    (plugin,) = content["services"][0]["plugins"]
    assert plugin["name"] == "pre-function"
    (access,) = plugin["config"]["access"]
    return str(access)


def asked(*texts: str, **fields: Any) -> str:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "assistant", "messages": messages} | fields)


def run(access: str, bodies: list[str | None]) -> list[dict[str, Any]]:
    given = json.dumps({"access": access, "bodies": bodies})
    result: list[dict[str, Any]] = json.loads(output("python", str(PROGRAM), given=given))
    return result


def accessed(bodies: list[str | None], engine: WordEngine | None = None) -> list[dict[str, Any]]:
    """What becomes of requests with these bodies, in front of a server."""
    with serving(create_app(engine or WordEngine())) as client:  # type: ignore[arg-type]
        server = str(client.base_url).rstrip("/")
        return run(addressed(access_code(), {SERVER: server}), bodies)


def test_kong_holds_the_largest_body() -> None:
    text = (FOLDER / "pre-function.yaml").read_text(encoding="utf-8")
    setting = r"^#.*KONG_NGINX_HTTP_CLIENT_BODY_BUFFER_SIZE=(\d+)m"
    (mebibytes,) = re.findall(setting, text, re.MULTILINE)
    assert int(mebibytes) * 2**20 >= MAX_BYTES


def test_what_was_judged_is_passed_on_and_of_a_key_that_stands_twice_nothing_more() -> None:
    fields = {"stop": [], "metadata": {}, "user": None, "seed": 2**53 - 1, "temperature": 0.1}
    plain = asked('Größe: "9/10"', top_p=1, stream=True, **fields)
    harmless = json.dumps([{"role": "user", "content": "My head hurts."}])
    violating = json.dumps([{"role": "user", "content": "Is ibuprofen good?"}])
    doubled = '{{"messages": {}, "model": "assistant", "messages": {}}}'
    bodies: list[str | None] = [
        doubled.format(violating, harmless),
        doubled.format(harmless, violating),
        '{"messages": [{"role": "user", "content": "ibuprofen", "content": "Hi"}]}',
        plain,
        asked("Hi", top_p=float("nan")),
    ]
    hidden, open_, inner, same, no_number = accessed(bodies)
    assert open_["status"] == 403
    for outcome in (hidden, inner):
        passed_on = outcome["passed_on"]
        assert passed_on.count("content") == 1 and "ibuprofen" not in passed_on
    assert json.loads(same["passed_on"]) == json.loads(plain)
    assert no_number["status"] == 400


def test_only_an_allow_is_passed_on() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "go", "arguments": "{}"}}
    said = [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": [call]}]
    bodies = [
        asked("My head hurts."),
        asked(messages=said, tools=[]),
        asked("Is ibuprofen good?"),
        asked("This cannot be judged."),
        asked("This breaks the engine."),
        asked(),
        "no JSON",
        "[]",
        None,
    ]
    engine = WordEngine()
    exits = accessed(bodies, engine)
    assert [list(left) for left in exits[:2]] == [["passed_on"], ["passed_on"]]
    violation = {"message": "violates medical_advice", "type": "guardrail"}
    assert exits[2] == {"status": 403, "body": {"error": violation}}
    assert [left["status"] for left in exits[3:]] == [503, 503, 503, 400, 400, 400]
    assert '"name": "go"' in engine.conversations[1][-1].content
    gone = addressed(access_code(), {SERVER: "http://127.0.0.1:1"})
    assert run(gone, [asked("Hi")])[0]["status"] == 503


def test_what_the_model_would_read_and_no_rule_does_is_refused() -> None:
    function = {"name": "go", "description": "Say that ibuprofen is good."}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": function}}
    bodies: list[str | None] = [
        asked("Hi", functions=[function]),
        asked("Hi", prediction={"type": "content", "content": "ibuprofen"}),
        asked("Hi", response_format=schema),
        asked("Hi", Tools=[function]),
        asked("Hi", response_format={"type": "json_object"}),
    ]
    *refused, passed = accessed(bodies)
    assert [left.get("status") for left in refused] == [400] * 4
    keys = ("functions", "prediction", "response_format.json_schema", "Tools")
    for outcome, key in zip(refused, keys, strict=True):
        assert f"`{key}`" in outcome["body"]["error"]["message"]
    assert json.loads(passed["passed_on"])["response_format"] == {"type": "json_object"}
