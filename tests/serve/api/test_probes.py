"""Probes: alive and ready are two things, and neither is said of a server that is not."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from serve.api.app import create_app
from tests.serve.serving import MESSAGES, serving
from tests.serve.toy_engine import MortalEngine, ToyEngine

BODY = {"messages": MESSAGES, "rules": ["fine"]}


def probe(client: httpx.Client) -> tuple[int, int]:
    """The statuses of /healthz and /readyz; /health is the latter."""
    alive, ready, fms = (client.get(path) for path in ("/healthz", "/readyz", "/health"))
    assert (ready.status_code, ready.json()) == (fms.status_code, fms.json())
    for response in (alive, ready):
        assert response.json() == {"status": "ok" if response.is_success else "down"}
    return alive.status_code, ready.status_code


def test_an_engine_that_has_failed_is_neither_alive_nor_ready() -> None:
    engine = ToyEngine()
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        assert probe(client) == (200, 200)
        engine.is_usable = False
        assert probe(client) == (503, 503)


def test_a_full_queue_is_alive_and_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.engine.thread.engine_thread.MAX_QUEUED", 1)
    monkeypatch.setattr("serve.engine.thread.engine_thread.MAX_OPEN", 1)
    engine = ToyEngine()
    engine.may_step.clear()
    with serving(create_app(engine)) as client, ThreadPoolExecutor(2) as pool:  # type: ignore[arg-type]
        first = pool.submit(client.post, "/v1/check", json=BODY)
        while not engine.open:
            time.sleep(0.001)
        second = pool.submit(client.post, "/v1/check", json=BODY)
        while "guard_checks_waiting 1.0" not in client.get("/metrics").text:
            time.sleep(0.001)
        assert probe(client) == (200, 503)
        shed = client.post("/v1/check", json=BODY)
        assert (shed.status_code, shed.json()["verdict"]) == (503, "unjudged")
        assert int(shed.headers["retry-after"]) > 0
        engine.may_step.set()
        assert {first.result(10).status_code, second.result(10).status_code} == {200}
        assert probe(client) == (200, 200)


def test_while_a_dead_engine_is_started_again_checks_are_unjudged_and_the_server_alive() -> None:
    engine = MortalEngine()
    engine.may_start.clear()
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        killed = client.post("/v1/check", json=BODY | {"rules": ["fine", "kill"]})
        meanwhile = client.post("/v1/check", json=BODY)
        assert "being started again" in meanwhile.json()["error"]
        for response in (killed, meanwhile):
            assert (response.status_code, response.json()["verdict"]) == (503, "unjudged")
        assert int(meanwhile.headers["retry-after"]) > 0
        assert "retry-after" not in killed.headers  # it would kill the next engine too
        assert probe(client) == (200, 503)
        engine.may_start.set()
        while client.get("/readyz").status_code != 200:
            time.sleep(0.001)
        assert client.post("/v1/check", json=BODY).status_code == 200
        counted = client.get("/metrics").text
        assert 'guard_engine_restarts_total{outcome="started"} 1.0' in counted
        assert 'guard_engine_restarts_total{outcome="failed"} 0.0' in counted
