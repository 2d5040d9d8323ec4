"""A check ends when its caller is gone, when the engine hangs, and when one beside it fails."""

from __future__ import annotations

import time

import httpx
import pytest

from serve.api.app import create_app
from serve.api.limits import TEXTS_AT_ONCE
from tests.serve.serving import MESSAGES, serving
from tests.serve.toy_engine import ToyEngine


def test_a_caller_that_closes_the_connection_frees_the_engine() -> None:
    engine = ToyEngine()
    engine.on_step = lambda: time.sleep(0.02)
    engine.rules |= {f"rule {number}": engine.rules["fine"] for number in range(1000)}
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        with pytest.raises(httpx.ReadTimeout):
            client.post(
                "/v1/check",
                json={
                    "messages": MESSAGES,
                    "rules": [name for name in engine.rules if name[:4] == "rule"],
                },
                timeout=0.3,
            )
        assert len(engine.open) == 1
        began = time.monotonic()
        while engine.open and time.monotonic() < began + 5:
            time.sleep(0.01)
        assert engine.open == []  # it would have taken twenty seconds


def test_an_engine_that_hangs_keeps_nobody_waiting_and_is_not_healthy() -> None:
    engine = ToyEngine()
    engine.may_step.clear()
    with serving(create_app(engine, timeout_s=0.3)) as client:  # type: ignore[arg-type]
        response = client.post(
            "/v1/check", json={"messages": MESSAGES, "rules": ["fine"]}, timeout=5
        )
        assert (response.status_code, response.json()["verdict"]) == (503, "unjudged")
        assert "took too long" in response.json()["error"]
        assert client.get("/health").status_code == 503
        engine.may_step.set()
        while client.get("/health").status_code != 200:
            time.sleep(0.01)
        assert (
            client.post("/v1/check", json={"messages": MESSAGES, "rules": ["fine"]}).status_code
            == 200
        )


def test_of_several_texts_few_are_begun_and_none_is_left_after_an_error() -> None:
    engine = ToyEngine({"fine": -2.0})
    engine.may_step.clear()
    with serving(create_app(engine, timeout_s=0.3)) as client:  # type: ignore[arg-type]
        texts = [f"text {number}" for number in range(10 * TEXTS_AT_ONCE)]
        response = client.post("/v1/moderations", json={"input": texts}, timeout=5)
        assert response.status_code == 503
        engine.may_step.set()
        while client.get("/health").status_code != 200:
            time.sleep(0.01)
        assert client.post("/v1/moderations", json={"input": "last"}).status_code == 200
    begun = {messages[0].content for messages in engine.conversations}
    assert begun <= {*texts[:TEXTS_AT_ONCE], "last"}
