"""Connections that send heads for ever, slowly or not at all, or do not read, or what could be read
as two requests; on real sockets. `tests/serve/fuzz/sequences.py` has requests in all orders.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from serve.api.input import bounded_heads as module
from serve.api.input.bounded_heads import MAX_HEAD, MAX_WAITING, bounded_heads
from tests.waiting import wait_until

HEAD = b"POST / HTTP/1.1\r\nhost: here\r\n"
NEXT = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"
HEAD_S = 0.4
KEEP_ALIVE_S = 1


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """Answers every request once its body is complete, with more than sockets hold for `/long`, and
    with the names of its headers and its body for `/echo`; one for `/early` before, and one for
    `/gone` once its client is gone.
    """
    received = b""
    more = scope["path"] != "/early"
    while more:
        message = await receive()
        received += message.get("body", b"")
        more = message.get("more_body", False)
    while scope["path"] == "/gone" and (await receive())["type"] != "http.disconnect":
        pass
    body = b"hi" * (2**24 if scope["path"] == "/long" else 1)
    if scope["path"] == "/echo":
        body = b" ".join(name for name, _ in scope["headers"]) + b"|" + received
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def server() -> Iterator[uvicorn.Server]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        hello,
        http=bounded_heads(HEAD_S),
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


def answer_to(address: tuple[str, int], sent: bytes) -> bytes:
    with opened(address, sent) as connection:
        return answer(connection)


CHUNKED = b"transfer-encoding: chunked\r\n"
CLOSED = pytest.raises((BrokenPipeError, ConnectionResetError))


@pytest.mark.parametrize(
    ("begins", "piece"),
    [
        (HEAD, b"x-more: " + b"a" * 2000 + b"\r\n"),
        (b"POST /", b"a" * 2000),
        # Trailers come behind a body in chunks, and uvicorn keeps them all.
        (HEAD + CHUNKED + b"\r\n0\r\n", b"x-more: a\r\n" * 100),
        (HEAD + CHUNKED + b"\r\n0\r\n", b"a" * 100_000),
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


def test_what_is_too_large_or_takes_too_long_is_said(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(module, "MAX_HEAD", 100)
        said = answer_to(address, HEAD + b"x-more: " + b"a" * 200 + b"\r\nx-next: b\r\n")
        assert said.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    started = time.monotonic()
    behind_large_bodies = 2 * (HEAD + b"content-length: 200000\r\n\r\n" + b" " * 200_000)
    with opened(address, behind_large_bodies + HEAD) as connection:
        said = answer(connection)
    assert time.monotonic() - started > HEAD_S - 0.1
    assert said.count(b"\r\n\r\nhi") == 2 and b"HTTP/1.1 408 Request Timeout\r\n" in said


def test_a_connection_that_begins_no_request_is_closed(address: tuple[str, int]) -> None:
    silent, noisy, asked = opened(address), opened(address, b"\r\n"), opened(address, NEXT)
    assert asked.recv(65536).endswith(b"hi")
    asked.sendall(b"\r\n")
    for connection in (silent, noisy, asked):
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


def test_bodies_and_further_requests_take_the_time_that_they_take(address: tuple[str, int]) -> None:
    with opened(address) as connection:
        for _ in range(2):
            connection.sendall(HEAD + b"content-length: 200000\r\n\r\n" + b" " * 100_000)
            time.sleep(1.5 * HEAD_S)
            connection.sendall(b" " * 100_000)
            assert connection.recv(65536).endswith(b"hi")
            time.sleep(1.5 * HEAD_S)


def test_a_connection_on_which_too_many_wait_is_closed(address: tuple[str, int]) -> None:
    with opened(address, NEXT * (1 + MAX_WAITING)) as fit, opened(address, NEXT * 1000) as many:
        assert answer(fit).count(b"\r\n\r\nhi") == 1 + MAX_WAITING
        assert answer(many).count(b"\r\n\r\nhi") <= 1 + MAX_WAITING


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


BODY = b"POST /smuggled HTTP/1.1\r\nhost: here\r\ncontent-length: 0\r\n\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKS = b"%x;a=b\r\n%b\r\n0\r\nx-more: a\r\n\r\n" % (len(BODY), BODY)
CLOSE = b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n"
TUNNEL = b"CONNECT here:80 HTTP/1.1\r\nhost: here\r\n"
ONE = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\n{}"
WRONG = {  # heads and bodies that are refused, and by which status
    "no host": (b"GET / HTTP/1.1\r\n\r\n", b"400"),
    "two hosts": (HEAD + b"Host: there\r\n\r\n", b"400"),
    "another version": (b"GET / HTTP/2.0\r\nhost: here\r\n\r\n", b"505"),
    "a tunnel": (TUNNEL + LENGTH + b"\r\n" + BODY, b"501"),
    "a tunnel and Upgrade": (TUNNEL + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n", b"501"),
    "another coding": (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKS, b"501"),
    "two lengths": (HEAD + LENGTH + LENGTH + b"\r\n" + BODY, b"400"),
    "length and chunks": (HEAD + LENGTH + CHUNKED + b"\r\n" + CHUNKS, b"400"),
    "a broken chunk": (HEAD + CHUNKED + b"\r\n5\r\nhelloworld", b"400"),
    "a trailer that closes": (HEAD + CHUNKED + b"\r\n0\r\nconnection: close\r\n\r\n", b"400"),
}


@pytest.mark.parametrize("framing", [LENGTH, CHUNKED], ids=["length", "chunks"])
@pytest.mark.parametrize("method", [b"POST", b"OPTIONS"])
def test_a_request_for_another_protocol_is_read_as_if_it_asked_for_none(
    address: tuple[str, int], method: bytes, framing: bytes
) -> None:
    """`tests/serve/fuzz/sequences.py` has other protocols, cut into any pieces."""
    head = method + b" /echo HTTP/1.1\r\nhost: here\r\n" + framing
    head += b"connection: keep-alive, Upgrade\r\nupgrade: h2c\r\nx-last: a\r\n\r\n"
    body = BODY if framing == LENGTH else CHUNKS
    said = answer_to(address, 2 * (head + body) + CLOSE)
    first, second, last, *behind = said.split(b"HTTP/1.1 ")[1:]
    names = b"host " + framing.split(b":")[0] + b" connection x-last|"
    assert first == second and first.endswith(b"\r\n\r\n" + names + BODY)
    assert last.endswith(b"hi") and not behind


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name", WRONG)
def test_a_refusal_is_the_last_answer(address: tuple[str, int], name: str, before: int) -> None:
    sent, status = WRONG[name]
    answers = answer_to(address, before * ONE + sent + CLOSE).split(b"HTTP/1.1 ")[1:]
    assert [piece[:3] for piece in answers] == [b"200"] * before + [status]
    assert b"connection: close" in answers[-1]


def test_a_client_that_is_gone_is_seen(server: uvicorn.Server, address: tuple[str, int]) -> None:
    tasks = server.server_state.tasks
    with opened(address, b"GET /gone HTTP/1.1\r\nhost: here\r\n\r\n" + NEXT):
        wait_until(lambda: tasks, 10)
    wait_until(lambda: not tasks, 10)


@pytest.mark.parametrize(("version", "count"), [("1.1", 1), ("1.0", 0)])
def test_only_1_1_is_told_to_go_on(address: tuple[str, int], version: str, count: int) -> None:
    sent = f"POST / HTTP/{version}\r\nhost: here\r\nexpect: 100-continue\r\n".encode()
    sent += b"connection: close\r\ncontent-length: 2\r\n\r\nhi"
    said = answer_to(address, sent)
    assert said.count(b"HTTP/1.1 100 ") == count and b"HTTP/1.1 200 " in said
