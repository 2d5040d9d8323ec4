"""What is refused before it is read; formats/test_check.py has the limits of one body."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from httpx import Client
from pydantic import TypeAdapter, ValidationError

from serve.api.app import create_app
from serve.api.input.limits import MAX_BYTES, Metadata
from serve.policy.logic import MAX_METADATA
from tests.serve.api.streaming import OpenStream, streamed
from tests.serve.serving import MESSAGES, Serve
from tests.serve.toy_engine import ToyEngine
from tests.waiting import wait_until

FINE = {"messages": MESSAGES, "rules": ["fine"]}


def test_more_requests_than_may_be_under_way_are_refused_before_they_are_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.api.input.limits.MAX_REQUESTS", 1)
    engine = ToyEngine()
    engine.may_step.clear()
    client = serve(engine)
    with ThreadPoolExecutor(1) as other:
        under_way = other.submit(client.post, "/v1/check", json=FINE)
        wait_until(lambda: engine.open)
        response = client.post("/v1/check", json=FINE)
        assert (response.status_code, response.json()["verdict"]) == (503, "unjudged")
        assert client.get("/health").status_code == 200
        engine.may_step.set()
        assert under_way.result(10).status_code == 200
    assert client.post("/v1/check", json=FINE).status_code == 200


def test_streams_have_places_of_their_own(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.api.input.limits.MAX_STREAMS", 1)
    monkeypatch.setattr("serve.api.input.limits.MAX_REQUESTS", 1)
    client = serve(ToyEngine({"fine": -2.0}))

    async def use(stream: OpenStream) -> None:
        assert client.post("/v1/check", json=FINE).status_code == 200
        second = client.post("/v1/check/stream", json=FINE)
        assert (second.status_code, second.json()["verdict"]) == (503, "unjudged")
        await end(stream)

    async def end(stream: OpenStream) -> None:
        stream.write({"append": "Fine.", "end": True})
        assert (await stream.rest())[-1]["judgement"]["verdict"] == "allow"

    streamed(client, FINE, use)
    streamed(client, FINE, end)  # the place of the one before is free again: its head came


@pytest.mark.parametrize("stated", ["0", "-5", "soon", "1.5", "", "9999999999", f"{'0' * 5000}1"])
def test_a_deadline_that_is_none_is_refused(client: Client, stated: str) -> None:
    headers = {"guard-timeout-ms": stated}
    response = client.post("/v1/check", json={"messages": MESSAGES}, headers=headers)
    assert (response.status_code, response.json()["verdict"]) == (400, "unjudged")
    assert "guard-timeout-ms" in response.json()["error"]


def test_a_body_that_trickles_is_refused_in_time_and_holds_no_place(serve: Serve) -> None:
    head = (
        b"POST /v1/check HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
        b"content-length: 1000\r\n\r\n{"
    )
    client = serve(ToyEngine(), timeout_s=0.3)
    address = (client.base_url.host, client.base_url.port or 0)
    with socket.create_connection(address, timeout=60) as slow:
        slow.sendall(head)
        response = slow.recv(65536)
    assert response.startswith(b"HTTP/1.1 408 ") and b'"unjudged"' in response
    # On a busy machine one check may take longer than this server lets it.
    wait_until(lambda: client.post("/v1/check", json=FINE).status_code == 200)


def test_a_client_that_does_not_read_its_answer_holds_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve.api.input.limits.MAX_STREAMS", 1)
    app = create_app(ToyEngine({"fine": -2.0}), timeout_s=1.0)  # type: ignore[arg-type]
    lines = [json.dumps(FINE).encode(), b'{"append": "Fine.", "end": true}']

    async def statuses_of(is_read: bool) -> list[int]:
        """Of a stream's answer, whose lines are read or wait for ever."""
        statuses = []
        body = {"type": "http.request", "body": b"\n".join(lines), "more_body": False}
        received = [body]

        async def receive() -> dict[str, object]:
            if not received:
                await asyncio.sleep(60)
            return received.pop()

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            elif not is_read:
                await asyncio.sleep(60)

        scope = {"type": "http", "method": "POST", "path": "/v1/check/stream", "headers": []}
        await app(scope | {"query_string": b"", "client": None}, receive, send)
        return statuses

    async def one_after_the_other() -> list[list[int]]:
        async with app.router.lifespan_context(app):
            unread = await asyncio.wait_for(statuses_of(is_read=False), 30)
            return [unread, await statuses_of(is_read=True)]

    assert asyncio.run(one_after_the_other()) == [[200], [200]]


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_too_large_body_is_refused_stated_or_not(client: Client, is_stated: bool) -> None:
    body: bytes | Iterator[bytes] = b" " * (MAX_BYTES + 1)
    if not is_stated:
        body = iter([b" " * 2**20] * (MAX_BYTES // 2**20 + 1))
    kind = {"content-type": "application/json"}
    response = client.post("/v1/check", content=body, headers=kind)
    assert (response.status_code, response.json()["verdict"]) == (413, "unjudged")
    assert client.post("/v1/check", json={"messages": MESSAGES}).status_code == 200


def test_metadata_of_many_keys_are_one_error_and_not_one_for_each() -> None:
    metadata = TypeAdapter[Any](Metadata)
    assert metadata.validate_python({"team": "support"}) == {"team": "support"}
    with pytest.raises(ValidationError, match="at most") as refused:
        metadata.validate_python({str(key): 1 for key in range(1_000)})
    assert refused.value.error_count() == 1
    assert metadata.json_schema()["maxProperties"] == MAX_METADATA
