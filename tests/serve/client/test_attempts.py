"""A check's attempts: what is sent, and when the next one may be."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from serve.client.answers import CheckFailed
from serve.client.attempts import Asked, Attempts

MESSAGES = [{"role": "user", "content": "Hello"}]


def test_only_what_was_named_is_sent() -> None:
    assert Asked().body(MESSAGES) == {"messages": MESSAGES}
    asked = Asked(["a"], None, {"channel": "email"}, "salt")
    named = {"rules": ["a"], "metadata": {"channel": "email"}, "cache_salt": "salt"}
    assert asked.body(MESSAGES) == {"messages": MESSAGES, **named}
    assert Asked(rule_set="support").body(MESSAGES)["rule_set"] == "support"


def test_the_server_is_told_how_long_is_left() -> None:
    attempts = Attempts(2.0)
    time.sleep(0.05)
    headers = attempts.headers("secret")
    assert 0 < int(headers["guard-timeout-ms"]) < 2000
    assert headers["authorization"] == "Bearer secret"
    assert "authorization" not in attempts.headers(None)


def test_nothing_is_sent_after_the_deadline() -> None:
    with pytest.raises(CheckFailed, match="before the deadline"):
        Attempts(0.0).headers(None)


@pytest.mark.parametrize(("stated", "seconds"), [("2", 2.0), ("0", 0.3), ("soon", 1.0)])
def test_no_room_means_to_wait_as_the_server_says(stated: str, seconds: float) -> None:
    response = httpx.Response(503, headers={"retry-after": stated})
    assert Attempts(10).answer(response) == seconds
    with pytest.raises(CheckFailed, match="503"):
        Attempts(0.2).answer(response)


def nested(depth: int) -> list[Any]:
    content: list[Any] = []
    for _ in range(depth):
        content = [content]
    return content


@pytest.mark.parametrize("content", ["\ud800", float("nan"), b"bytes", nested(100_000)])
def test_what_cannot_be_sent_is_no_answer(content: object) -> None:
    with pytest.raises(CheckFailed, match="cannot be sent"):
        Asked().content([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("messages", "selection", "message"),
    [
        ([], Asked(rules="medical_advice"), r"rules must be a list, .*\['medical_advice'\]"),
        ([], Asked(tools={"name": "f"}), "tools must be a list"),  # type: ignore[arg-type]
        ("Hello", Asked(), "messages must be a list, got 'Hello'"),
        ({"role": "user", "content": "Hi"}, Asked(), "messages must be a list"),
    ],
)
def test_a_single_value_is_no_list(messages: Any, selection: Asked, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        selection.content(messages)
