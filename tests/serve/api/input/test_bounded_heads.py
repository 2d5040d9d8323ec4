"""Connections that send heads for ever, slowly or not at all, or do not read; on real sockets.
`tests/serve/fuzz/sequences.py` has requests in all orders, and what could be read as two.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from serve.api.input.bounded_heads import MAX_HEAD, bounded_heads
from tests.waiting import wait_until

HEAD = b"POST / HTTP/1.1\r\nhost: here\r\n"
NEXT = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"
HEAD_S = 0.4
KEEP_ALIVE_S = 1


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """Answers every request once its body is complete, with more than sockets hold for `/long`; one
    for `/early` before, and one for `/gone` once its client is gone.
    """
    more = scope["path"] != "/early"
    while more:
        message = await receive()
        more = message.get("more_body", False)
    while scope["path"] == "/gone" and (await receive())["type"] != "http.disconnect":
        pass
    body = b"hi" * (2**24 if scope["path"] == "/long" else 1)
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def server() -> Iterator[uvicorn.Server]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        hello,
        http=bounded_heads(HEAD_S),
        h11_max_incomplete_event_size=MAX_HEAD,
        ws="none",
        log_level="critical",
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_until(lambda: server.started)
    yield server
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def address(server: uvicorn.Server) -> tuple[str, int]:
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    return host, port


def opened(address: tuple[str, int], sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(address, timeout=60)
    connection.sendall(sent)
    return connection


def answer(connection: socket.socket) -> bytes:
    said = b""
    try:
        while piece := connection.recv(65536):
            said += piece
    except ConnectionResetError:
        pass
    return said


CHUNKED = b"transfer-encoding: chunked\r\n"
CLOSED = pytest.raises((BrokenPipeError, ConnectionResetError))


@pytest.mark.parametrize(
    ("begins", "piece"),
    [
        (HEAD, b"x-more: " + b"a" * 2000 + b"\r\n"),
        (b"POST /", b"a" * 2000),
        # Trailers come behind a body in chunks, and uvicorn keeps them all.
        (HEAD + CHUNKED + b"\r\n0\r\n", b"x-more: a\r\n" * 100),
    ],
)
def test_what_has_no_end_is_refused(address: tuple[str, int], begins: bytes, piece: bytes) -> None:
    with opened(address, begins) as connection:
        sent = 0
        with CLOSED:
            while sent < 64 * MAX_HEAD:
                connection.sendall(piece)
                sent += len(piece)
    assert sent < 64 * MAX_HEAD


def test_a_head_that_takes_too_long_ends_the_connection(address: tuple[str, int]) -> None:
    started = time.monotonic()
    behind_large_bodies = 2 * (HEAD + b"content-length: 200000\r\n\r\n" + b" " * 200_000)
    said = answer(opened(address, behind_large_bodies + HEAD))
    assert time.monotonic() - started > HEAD_S - 0.1
    assert said.count(b"HTTP/1.1 ") == said.count(b"\r\n\r\nhi") == 2


def test_a_connection_that_begins_no_request_is_closed(address: tuple[str, int]) -> None:
    silent, slow, asked = opened(address), opened(address, b"P"), opened(address, NEXT)
    assert asked.recv(65536).endswith(b"hi")
    for connection in (silent, slow, asked):
        with connection:
            assert answer(connection) == b""


def test_a_body_that_nobody_reads_does_not_keep_a_connection(address: tuple[str, int]) -> None:
    began = time.monotonic()
    head = b"GET /early HTTP/1.1\r\nhost: here\r\ncontent-length: 1000000\r\n\r\n"
    with opened(address, head) as connection, CLOSED:
        while time.monotonic() < began + 60:
            connection.sendall(b" ")
            time.sleep(0.05)
    head = b"POST /early HTTP/1.1\r\nhost: here\r\n" + CHUNKED + b"\r\n"
    with opened(address, head) as connection:
        assert connection.recv(65536).endswith(b"hi")
        connection.sendall(b"no chunk\r\n" + NEXT)
        assert answer(connection) == b""  # it has its answer
    head = b"POST /early HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\n"
    with opened(address, head) as connection:
        assert connection.recv(65536).endswith(b"hi")
        connection.sendall(b"{}")
        assert answer(connection) == b""  # and begins no other


def test_bodies_and_further_requests_take_the_time_that_they_take(address: tuple[str, int]) -> None:
    with opened(address) as connection:
        for _ in range(2):
            connection.sendall(HEAD + b"content-length: 200000\r\n\r\n" + b" " * 100_000)
            time.sleep(1.5 * HEAD_S)
            connection.sendall(b" " * 100_000)
            assert connection.recv(65536).endswith(b"hi")
            time.sleep(1.5 * HEAD_S)


@pytest.mark.parametrize("kept", [b"keep-alive", b"close"])
def test_a_client_that_does_not_read_its_answer_is_closed_too(
    server: uvicorn.Server, address: tuple[str, int], kept: bytes
) -> None:
    connections = server.server_state.connections
    wait_until(lambda: not connections, 10)  # of the tests before
    head = b"GET /long HTTP/1.1\r\nhost: here\r\nconnection: " + kept
    with opened(address, head + b"\r\n\r\n"):
        wait_until(lambda: connections, 10)
        wait_until(lambda: not connections, 10)


def test_a_client_that_is_gone_is_seen(server: uvicorn.Server, address: tuple[str, int]) -> None:
    tasks = server.server_state.tasks
    with opened(address, b"GET /gone HTTP/1.1\r\nhost: here\r\n\r\n"):
        wait_until(lambda: tasks, 10)
    wait_until(lambda: not tasks, 10)
