"""Probes: alive and ready are two things, and neither is said of a server that is not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from httpx import Client

from tests.serve.serving import MESSAGES, Serve
from tests.serve.toy_engine import MortalEngine, ToyEngine
from tests.waiting import wait_until

BODY = {"messages": MESSAGES, "rules": ["fine"]}


def probe(client: Client) -> tuple[int, int]:
    """The statuses of /healthz and /readyz; /health is the latter."""
    alive, ready, fms = (client.get(path) for path in ("/healthz", "/readyz", "/health"))
    assert (ready.status_code, ready.json()) == (fms.status_code, fms.json())
    for response in (alive, ready):
        assert response.json() == {"status": "ok" if response.is_success else "down"}
    return alive.status_code, ready.status_code


def test_an_engine_that_has_failed_is_neither_alive_nor_ready(serve: Serve) -> None:
    engine = ToyEngine()
    client = serve(engine)
    assert probe(client) == (200, 200)
    engine.is_usable = False
    assert probe(client) == (503, 503)


def test_a_full_queue_is_alive_and_not_ready(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.engine.thread.engine_thread.MAX_QUEUED", 1)
    monkeypatch.setattr("serve.engine.thread.engine_thread.MAX_OPEN", 1)
    engine = ToyEngine()
    engine.may_step.clear()
    client = serve(engine)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.post, "/v1/check", json=BODY)
        wait_until(lambda: engine.open)
        second = pool.submit(client.post, "/v1/check", json=BODY)
        wait_until(lambda: "guard_checks_waiting 1.0" in client.get("/metrics").text)
        assert probe(client) == (200, 503)
        shed = client.post("/v1/check", json=BODY)
        assert (shed.status_code, shed.json()["verdict"]) == (503, "unjudged")
        assert int(shed.headers["retry-after"]) > 0
        engine.may_step.set()
        assert {first.result(10).status_code, second.result(10).status_code} == {200}
    assert probe(client) == (200, 200)


def test_while_an_engine_starts_again_checks_are_unjudged(serve: Serve) -> None:
    engine = MortalEngine()
    engine.may_start.clear()
    client = serve(engine)
    killed = client.post("/v1/check", json=BODY | {"rules": ["fine", "kill"]})
    meanwhile = client.post("/v1/check", json=BODY)
    assert "being started again" in meanwhile.json()["error"]
    for response in (killed, meanwhile):
        assert (response.status_code, response.json()["verdict"]) == (503, "unjudged")
    assert int(meanwhile.headers["retry-after"]) > 0
    assert "retry-after" not in killed.headers  # it would kill the next engine too
    assert probe(client) == (200, 503)
    engine.may_start.set()
    wait_until(lambda: client.get("/readyz").status_code == 200)
    assert client.post("/v1/check", json=BODY).status_code == 200
    counted = client.get("/metrics").text
    assert 'guard_engine_restarts_total{outcome="started"} 1.0' in counted
    assert 'guard_engine_restarts_total{outcome="failed"} 0.0' in counted
