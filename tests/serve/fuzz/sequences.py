"""Sequences of requests on one connection, cut into any pieces. Each request has one answer, in
order, and the one that it gets alone and without `Upgrade`; what is no request ends the connection.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import socket
import time
from collections.abc import Sequence
from http.client import HTTPResponse, RemoteDisconnected

from serve.api.app import create_app
from tests.serve.serving import MESSAGES, serving
from tests.serve.toy_engine import NeverAllows

Address = tuple[str, int]

CHECK = json.dumps({"messages": MESSAGES, "rules": ["always"]}).encode()
STREAM = CHECK + b'\n{"append": "Fine.", "end": true}\n'
SMUGGLED = b"POST /admin/rules/smuggled HTTP/1.1\r\nhost: here\r\ncontent-length: 0\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked"
CHUNKS = b'%x;name="a b"\r\n%b\r\n0\r\nx-more: a\r\n\r\n' % (len(CHECK), CHECK)


def request(
    method: str, path: str, body: bytes = b"", *fields: bytes, version: str = "1.1"
) -> bytes:
    """A request, with the length of its body unless `fields` say how that is sent."""
    lines = [f"{method} {path} HTTP/{version}".encode(), b"host: here", *fields]
    if body and not any(field.startswith(b"transfer-encoding") for field in fields):
        lines.append(b"content-length: %d" % len(body))
    if method == "POST":
        lines.append(b"content-type: application/json")
    return b"\r\n".join([*lines, b"", body])


def check(body: bytes, *fields: bytes, version: str = "1.1") -> bytes:
    return request("POST", "/v1/check", body, *fields, version=version)


ANSWERED = {
    "check": check(CHECK),
    "check in chunks": check(CHUNKS, CHUNKED),
    "stream": request("POST", "/v1/check/stream", STREAM),
    "moderation": request("POST", "/v1/moderations", b'{"model": "always", "input": "Hi"}'),
    "a request in a body": check(SMUGGLED),
    "a request in a chunk": check(b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED), CHUNKED),
    "a request to nowhere": request("POST", "/nowhere", SMUGGLED, b"expect: 100-continue"),
    "tunnel": request("CONNECT", "here:80", SMUGGLED),
    "a target with its host": request("GET", "http://here/v1/rules"),
    "health": request("GET", "/healthz"),
    "head": request("HEAD", "/readyz"),
}
# What is behind these has no answer.
ENDING = {
    "behind an empty line": b"\r\n" + request("GET", "/v1/rules"),
    "close": check(CHECK, b"connection: close"),
    "1.0 kept": check(CHECK, b"connection: keep-alive", version="1.0"),
    "chunks and length": check(CHUNKS, CHUNKED, b"content-length: 5"),
    "no chunks": check(b"", b"transfer-encoding: identity"),
    "signed length": check(b"", b"content-length: +5"),
}
REQUESTS = ANSWERED | ENDING
UPGRADES = [
    (b"Upgrade, HTTP2-Settings", b"h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"),
    (b"upgrade", b"websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA"),
    (b"upgrade", b"h2c\r\nupgrade: none-such/7"),
]
LAST = request("GET", "/healthz", b"", b"connection: close", b"x-request-id: last")
# What differs between two answers to the same request.
VARYING_FIELDS = ("date", "x-request-id", "content-length", "transfer-encoding")
VARYING = re.compile(rb'"latency_ms":[0-9.e-]+|"id":"[^"]*"')
PAUSE_S = 0.0003  # the server reads meanwhile
MOST = 6  # requests before the last; of nine that wait the server closes the connection

Answer = tuple[int, list[tuple[str, str]], bytes]  # status, fields, body


class Received(io.BytesIO):
    """All bytes of a connection, as http.client reads a socket."""

    def makefile(self, _: str) -> Received:
        return self

    def close(self) -> None:
        """Stays open for the next answer."""


def received(address: Address, pieces: Sequence[bytes]) -> Received:
    """What a connection of its own says to these pieces."""
    content = b""
    refused = contextlib.suppress(BrokenPipeError, ConnectionResetError)
    with socket.create_connection(address, timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with refused:
            for piece in pieces:
                connection.sendall(piece)
                if len(pieces) > 1:
                    time.sleep(PAUSE_S)
        with refused:
            while said := connection.recv(65536):
                content += said
    return Received(content)


def answers(said: Received, methods: Sequence[str]) -> list[Answer]:
    """What a client reads for requests of these methods. Raises AssertionError for bytes behind."""
    read = []
    for method in methods:
        response = HTTPResponse(said, method=method)  # type: ignore[arg-type]
        try:
            response.begin()
        except RemoteDisconnected:
            break
        body = VARYING.sub(b"", response.read())
        fields = [(name.lower(), value) for name, value in response.getheaders()]
        fields = [field for field in fields if field[0] not in VARYING_FIELDS]
        read.append((response.status, sorted(fields), body))
    behind = said.read()
    assert not behind, f"nobody asked for {behind[:200]!r}"
    return read


class Sequences:
    """Asks a server sequences, which depend on the seed alone."""

    def __init__(self, address: Address, seed: int) -> None:
        self._address = address
        self._random = random.Random(seed)
        self._alone: dict[str, list[Answer]] = {}
        for name, content in REQUESTS.items():
            self._alone[name] = self._answers([content], [content + LAST])
            ends = len(self._alone[name]) < 2
            assert ends == (name in ENDING), f"{name}: {self._alone[name]}"

    def try_one(self) -> None:
        """Ask one sequence. Raises AssertionError for an answer that is not the expected one."""
        count = self._random.randint(1, MOST)
        names = [self._random.choice(list(ANSWERED)) for _ in range(count)]
        if self._random.random() < 0.3:
            names[self._random.randrange(count)] = self._random.choice(list(ENDING))
        contents = [self._upgraded(REQUESTS[name]) for name in names]
        expected: list[Answer] = []
        for name in names:
            expected += self._alone[name][:1]
            if name in ENDING:
                break
        else:
            expected += self._alone["health"][1:]
        got = self._answers(contents, self._cut(b"".join([*contents, LAST])))
        assert got == expected, f"{names}:\n{contents}\ngot {got}\nexpected {expected}"

    def _answers(self, contents: Sequence[bytes], pieces: Sequence[bytes]) -> list[Answer]:
        methods = [content.split()[0].decode() for content in (*contents, LAST)]
        return answers(received(self._address, pieces), methods)

    def _upgraded(self, content: bytes) -> bytes:
        """The request, which may ask for another protocol too."""
        line, end, rest = content.partition(b"\r\nhost")
        if not end or self._random.random() < 0.5:
            return content
        connection, token = self._random.choice(UPGRADES)
        return line + b"\r\nConnection: %b\r\nUpgrade: %b" % (connection, token) + end + rest

    def _cut(self, content: bytes) -> list[bytes]:
        """The bytes in pieces: one, a few, or one for each."""
        cuts = self._random.choice([0, 1, 2, 5, 20, len(content)])
        if cuts == len(content):
            return [content[at : at + 1] for at in range(len(content))]
        places = sorted(self._random.sample(range(1, len(content)), cuts))
        limits = zip([0, *places], [*places, len(content)], strict=True)
        return [content[start:end] for start, end in limits]


def fuzz_sequences(seed: int, seconds: float, most: int | None = None) -> int:
    """Ask a server of its own sequences until the time is over, or `most`; how many they were.

    Raises AssertionError for a wrong answer, and where a body was taken for a request.
    """
    engine = NeverAllows()
    asked = 0
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        sequences = Sequences((client.base_url.host, client.base_url.port or 0), seed)
        until = time.monotonic() + seconds
        while time.monotonic() < until and asked != most:
            sequences.try_one()
            assert not engine.replaced, "a body was taken for an administrator's request"
            asked += 1
    return asked
