"""What is refused before it is read; formats/test_check.py has the limits of one body."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError

from serve.api.app import create_app
from serve.api.input.limits import MAX_BYTES, Metadata
from serve.policy.logic import MAX_METADATA
from tests.serve.api.streaming import OpenStream, streamed
from tests.serve.serving import MESSAGES, serving
from tests.serve.toy_engine import ToyEngine
from tests.waiting import wait_until


def test_more_requests_than_may_be_under_way_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve.api.input.limits.MAX_REQUESTS", 1)
    engine = ToyEngine()
    engine.may_step.clear()
    body = {"messages": MESSAGES, "rules": ["fine"]}
    with serving(create_app(engine)) as client, ThreadPoolExecutor(1) as other:  # type: ignore[arg-type]
        under_way = other.submit(client.post, "/v1/check", json=body)
        while not engine.open:
            time.sleep(0.001)
        response = client.post("/v1/check", json=body)
        assert (response.status_code, response.json()["verdict"]) == (503, "unjudged")
        assert client.get("/health").status_code == 200
        engine.may_step.set()
        assert under_way.result(10).status_code == 200
        assert client.post("/v1/check", json=body).status_code == 200


def test_streams_have_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.api.input.limits.MAX_STREAMS", 1)
    monkeypatch.setattr("serve.api.input.limits.MAX_REQUESTS", 1)
    opening = {"messages": MESSAGES, "rules": ["fine"]}

    async def use(stream: OpenStream) -> None:
        assert client.post("/v1/check", json=opening).status_code == 200
        second = client.post("/v1/check/stream", json=opening)
        assert (second.status_code, second.json()["verdict"]) == (503, "unjudged")
        stream.write({"append": "Fine.", "end": True})
        assert (await stream.rest())[-1]["judgement"]["verdict"] == "allow"

    with serving(create_app(ToyEngine({"fine": -2.0}))) as client:  # type: ignore[arg-type]
        streamed(client, opening, use)
        streamed(client, opening, close_at_once)


async def close_at_once(stream: OpenStream) -> None:
    """The place of the stream before it is free again: its head came."""
    stream.write({"end": True})
    await stream.rest()


@pytest.mark.parametrize("stated", ["0", "-5", "soon", "1.5", "", "9999999999", f"{'0' * 5000}1"])
def test_a_deadline_that_is_none_is_refused(client: httpx.Client, stated: str) -> None:
    headers = {"guard-timeout-ms": stated}
    response = client.post("/v1/check", json={"messages": MESSAGES}, headers=headers)
    assert (response.status_code, response.json()["verdict"]) == (400, "unjudged")
    assert "guard-timeout-ms" in response.json()["error"]


def test_a_body_that_trickles_is_refused_in_time_and_holds_no_place() -> None:
    head = (
        b"POST /v1/check HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
        b"content-length: 1000\r\n\r\n{"
    )
    with serving(create_app(ToyEngine(), timeout_s=0.3)) as client:  # type: ignore[arg-type]
        address = (client.base_url.host, client.base_url.port or 0)
        with socket.create_connection(address, timeout=60) as slow:
            slow.sendall(head)
            response = slow.recv(65536)
        assert response.startswith(b"HTTP/1.1 408 ") and b'"unjudged"' in response
        check = {"messages": MESSAGES, "rules": ["fine"]}
        # On a busy machine one check may take longer than this server lets it.
        wait_until(lambda: client.post("/v1/check", json=check).status_code == 200)


def test_a_client_that_does_not_read_its_answer_holds_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve.api.input.limits.MAX_STREAMS", 1)
    app = create_app(ToyEngine({"fine": -2.0}), timeout_s=1.0)  # type: ignore[arg-type]
    opening = json.dumps({"messages": MESSAGES, "rules": ["fine"]}).encode()
    lines = [opening, b'{"append": "Fine.", "end": true}']

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
def test_a_body_that_is_too_large_is_refused_whether_or_not_it_says_so(
    client: httpx.Client, is_stated: bool
) -> None:
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
