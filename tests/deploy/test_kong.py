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


def plugin(name: str, file: str) -> dict[str, Any]:
    """The configuration of the one plugin of a file."""
    content = yaml.safe_load((FOLDER / file).read_text(encoding="utf-8"))
    (found,) = content.get("plugins") or content["services"][0]["plugins"]
    assert found["name"] == name
    config: dict[str, Any] = found["config"]
    return config


def asked(*texts: str, **fields: Any) -> str:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "assistant", "messages": messages} | fields)


def run(access: str, bodies: list[str | None], answers: list[Any] | None = None) -> dict[str, Any]:
    functions = plugin("ai-custom-guardrail", "ai-custom-guardrail.yaml")["functions"]
    given = {"access": access, "bodies": bodies, "guardrail": functions["check"]}
    given["answers"] = answers or []
    result: dict[str, Any] = json.loads(output("python", str(PROGRAM), given=json.dumps(given)))
    return result


def accessed(bodies: list[str | None], engine: WordEngine | None = None) -> list[dict[str, Any]]:
    """What becomes of requests with these bodies, in front of a server."""
    (access,) = plugin("pre-function", "pre-function.yaml")["access"]
    with serving(create_app(engine or WordEngine())) as client:  # type: ignore[arg-type]
        server = str(client.base_url).rstrip("/")
        outcomes: list[dict[str, Any]] = run(addressed(access, {SERVER: server}), bodies)["access"]
    return outcomes


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
    (access,) = plugin("pre-function", "pre-function.yaml")["access"]
    gone = addressed(access, {SERVER: "http://127.0.0.1:1"})
    assert run(gone, [asked("Hi")])["access"][0]["status"] == 503


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


def test_a_moderation_blocks_by_its_flags_and_raises_where_there_is_none() -> None:
    config = plugin("ai-custom-guardrail", "ai-custom-guardrail.yaml")
    assert config["stop_on_error"] is True and config["guarding_mode"] == "BOTH"
    assert config["request"]["url"] == f"{SERVER}/v1/moderations"
    answers = []
    with serving(create_app(WordEngine())) as client:  # type: ignore[arg-type]
        for text in (
            "Hi",
            "Is ibuprofen good?",
            "This cannot be judged.",
            "This breaks the engine.",
        ):
            answers.append(client.post("/v1/moderations", json={"input": text}).json())
    allowed, blocked, *errors = run("return 0", [], answers)["guardrail"]
    assert allowed["block"] is False
    assert blocked == {"block": True, "block_message": "violates medical_advice"}
    assert len(errors) == 2 and all("could not be judged" in error for error in errors)
