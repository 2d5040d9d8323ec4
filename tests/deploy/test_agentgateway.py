"""deploy/agentgateway/config.yaml: what its webhook sends is what the server reads."""

from __future__ import annotations

from typing import Any

import yaml

from serve.api.app import create_app
from tests.deploy.clients import DEPLOY
from tests.serve.serving import serving
from tests.serve.word_engine import WordEngine


def webhooks() -> dict[str, dict[str, Any]]:
    """The webhook of each side."""
    content = yaml.safe_load((DEPLOY / "agentgateway" / "config.yaml").read_text(encoding="utf-8"))
    (listener,) = content["binds"][0]["listeners"]
    guard = listener["routes"][0]["policies"]["ai"]["promptGuard"]
    return {side: guard[side][0]["webhook"] for side in ("request", "response")}


def test_a_reply_is_judged_with_these_headers_as_the_end_of_its_conversation() -> None:
    hooks = webhooks()
    asked = hooks["request"]
    assert asked == hooks["response"] and asked["target"] == {"host": "localhost:8000"}
    assert asked.get("failureMode", "failClosed") == "failClosed"
    headers = {}
    for name, expression in asked["headers"].items():
        # An expression is a text in quotes, or a header of the caller's.
        headers[name] = expression.strip('"') if expression.startswith('"') else "call 1"
    engine = WordEngine()
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        messages = [{"role": "user", "content": "My head hurts."}]
        passed = client.post("/request", json={"body": {"messages": messages}}, headers=headers)
        assert "status_code" not in passed.json()["action"]
        choices = [{"message": {"role": "assistant", "content": "Take ibuprofen."}}]
        rejected = client.post("/response", json={"body": {"choices": choices}}, headers=headers)
    assert rejected.json()["action"]["status_code"] == 403
    assert [message.role for message in engine.conversations[-1]] == ["user", "assistant"]
