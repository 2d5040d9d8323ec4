"""Bodies that are refused before they are read, and how the others are read: in any of Unicode's
encodings, and as JSON; formats/test_check.py has the limits of one body.
"""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from httpx import Client

from serve.api.input.limits import MAX_BYTES
from serve.api.input.strict_json import MAX_SIGNS, read_body
from tests.serve.api.streaming import OpenStream, streamed
from tests.serve.serving import MESSAGES, Serve
from tests.serve.toy_engine import ToyEngine
from tests.waiting import wait_until

FINE = {"messages": MESSAGES, "rules": ["fine"]}
JSON = "application/json"
BODY = json.dumps({"messages": MESSAGES}).encode()


def test_more_requests_than_may_be_under_way_are_refused_and_streams_have_places_of_their_own(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.api.input.limits.MAX_STREAMS", 1)
    monkeypatch.setattr("serve.api.input.limits.MAX_REQUESTS", 1)
    engine = ToyEngine({"fine": -2.0})
    client = serve(engine)

    async def use(stream: OpenStream) -> None:
        engine.may_step.clear()
        with ThreadPoolExecutor(1) as other:
            under_way = other.submit(client.post, "/v1/check", json=FINE)
            wait_until(lambda: engine.open)
            for path in ("/v1/check", "/v1/check/stream"):
                second = client.post(path, json=FINE)
                assert (second.status_code, second.json()["verdict"]) == (503, "unjudged")
            assert client.get("/readyz").status_code == 200
            engine.may_step.set()
            assert under_way.result(10).status_code == 200
        assert client.post("/v1/check", json=FINE).status_code == 200
        await end(stream)

    async def end(stream: OpenStream) -> None:
        stream.write({"append": "Fine.", "end": True})
        assert (await stream.rest())[-1]["judgement"]["verdict"] == "allow"

    streamed(client, FINE, use)
    streamed(client, FINE, end)  # the place of the one before is free again: its head came


def test_a_deadline_that_is_none_is_refused(client: Client) -> None:
    for stated in ("0", "-5", "1.5", "", "9999999999", f"{'0' * 5000}1"):
        response = posted(client, BODY, guard_timeout_ms=stated)
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


def test_a_too_large_body_is_refused_stated_or_not(client: Client) -> None:
    stated = b" " * (MAX_BYTES + 1)
    body: bytes | Iterator[bytes]
    for body in (stated, iter([stated[: 2**20]] * (MAX_BYTES // 2**20 + 1))):
        response = client.post("/v1/check", content=body)
        assert (response.status_code, response.json()["verdict"]) == (413, "unjudged")


def posted(client: Client, content: bytes | Iterator[bytes], **headers: str) -> httpx.Response:
    fields = {key.replace("_", "-"): value for key, value in headers.items()}
    return client.post("/v1/check", content=content, headers={"content-type": JSON} | fields)


def results(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()["results"]


def test_a_packed_body_is_refused_and_one_that_is_not_read(client: Client) -> None:
    for encoding in ("gzip", "br", "deflate", "identity, gzip"):
        response = posted(client, BODY, content_encoding=encoding)
        assert response.status_code == 415
        assert "content-encoding: bodies are read unpacked" in response.json()["error"]
        assert response.headers["accept-encoding"] == "identity"
    for encoding in ("identity", ""):
        results(posted(client, BODY, content_encoding=encoding))


def test_what_is_no_text_is_named(client: Client) -> None:
    for content, problem in (
        (gzip.compress(BODY), "a gzip file, not text in UTF-8"),
        ("{}".encode("utf-16") + b"\x00", "not Unicode"),
    ):
        response = posted(client, content)
        assert (response.status_code, response.json()["verdict"]) == (400, "unjudged")
        assert problem in response.json()["error"]


READ = ('charset="UTF-8"', "charset=us-ascii", 'charset=""', "xcharset=latin1; boundary=charset=x")
UNREAD = (
    "Charset = 'latin1'",
    "charset=utf-8; charset=utf-16",
    "charset*=utf-8''utf-16",
    "x=';'; charset=utf-16",
)


def test_no_charset_but_utf_8_is_read(client: Client) -> None:
    for parameters in READ:
        results(posted(client, BODY, content_type=f"{JSON}; {parameters}"))
    for parameters in UNREAD:
        response = posted(client, BODY, content_type=f"{JSON}; {parameters}")
        assert response.status_code == 415 and "content-type" in response.text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-be"])
def test_json_in_utf_16_or_32_is_known_by_its_first_bytes(client: Client, encoding: str) -> None:
    body = BODY.decode().encode(encoding)
    assert results(posted(client, body)) == results(posted(client, BODY))
    response = posted(client, body, content_type=f"{JSON}; charset=utf-8")
    assert (response.status_code, response.json()["verdict"]) == (415, "unjudged")
    assert "charset is utf-8" in response.json()["error"] and encoding in response.json()["error"]


def test_a_key_twice_is_refused_and_its_place_said(client: Client) -> None:
    chat = '"messages": [{"role": "user", "content": "Hi"}]'
    body = f"{{{chat}, {chat}}}"
    column = body.rindex('"messages"') + 1
    where = f"character {column - 1} (line 1, column {column})"
    response = posted(client, body.encode())
    assert response.status_code == 422
    assert f"the key 'messages' stands twice at {where}" in response.text


def test_a_body_of_very_many_values_is_refused(client: Client) -> None:
    """Each takes a kilobyte of memory to validate, and the time of everybody else."""
    many = ",".join(["{}"] * (MAX_SIGNS // 2 + 1))
    for key in ("tool_calls", "content", "extra"):
        body = f'{{"messages": [{{"role": "user", "{key}": [{many}]}}]}}'
        response = posted(client, body.encode())
        assert (response.status_code, response.json()["verdict"]) == (413, "unjudged")
        assert "the body has more than 300,000 commas" in response.text
    line = client.post("/v1/check/stream", content=f'{{"messages": [{many}]}}\n')
    assert line.status_code == 413 and "more than 300,000 commas" in line.text


def test_as_many_values_as_may_be_are_read_and_signs_in_texts_are_none() -> None:
    assert len(read_body(b"[" + b"1," * (MAX_SIGNS - 1) + b"1]")) == MAX_SIGNS
    text = '[,{"\\' * MAX_SIGNS
    assert read_body(json.dumps({"content": text}).encode()) == {"content": text}
    assert read_body(b"5") == 5


@pytest.mark.parametrize("content", ["[],", ",", '"\\"\\"' + "," * 9 + '\\"'])
def test_very_many_values_or_signs_of_them_take_no_time(content: str) -> None:
    body = ("[" + content * (4_000_000 // len(content))).encode()
    began = time.thread_time()
    with pytest.raises(ValueError):
        read_body(body)
    assert time.thread_time() - began < 2
