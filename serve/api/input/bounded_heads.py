"""How a connection is read: which requests stand on it one behind the other, how large the head of
one may be and how long it may take, how many may wait, and how long a client may leave its answer
unread. uvicorn bounds none of these, and reads bodies as requests.

A head is all that stands before a request's body; no middleware sees it before it is complete.
Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from http import HTTPStatus
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

log = logging.getLogger(__name__)

MAX_HEAD = 64 * 2**10  # bytes, give or take one read of the socket
MAX_WAITING = 8  # requests behind the one that is being answered


class RequestRefused(Exception):
    """Ends the parsing of a connection that gets no further answer."""


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's protocol, which also ends a connection whose head is too large or too slow, where
    too many requests wait, or whose client does not read.

    Every request has one answer, in order: one that asks for another protocol is read and answered
    as if it did not. What is no request, or could be read as two, is refused behind the answers to
    those before it, and ends the connection. The trailers behind a body in chunks count to the
    head's size, and say nothing. A connection that says nothing is kept for `timeout_keep_alive`
    seconds, as uvicorn keeps one that has been answered.
    """

    patience_s = 60.0  # from a head's first byte to its last, and for a client that does not read

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = False
        self._head_bytes = 0  # bytes of the URL and of the complete fields
        self._unparsed_bytes = 0  # bytes since the parser's last event, of an unfinished field
        self._timer: asyncio.TimerHandle | None = None
        self._current: RequestResponseCycle | None = None  # `cycle` is the one read last
        self._last_answer: bytes | None = None  # what ends the connection; then no more is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # By the kernel: what is not sent yet outlives both the request and a close of the transport
        # that TLS may have in between.
        connection = transport.get_extra_info("socket")
        milliseconds = round(1000 * self.patience_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._end_after(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._current is not None and self._is_answering:
            self.cycle = self._current
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unparsed_bytes += len(data)
        self._parse(data)
        if self._unparsed_bytes > MAX_HEAD + len(data):
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        if self._timer is None and not self._is_in_head and not self._is_answering:
            self._end_after(self.timeout_keep_alive)  # bytes that begin no head

    def _parse(self, data: bytes) -> None:
        """Have the bytes parsed. httptools takes what is behind a head with `Upgrade` for the other
        protocol's, so it gets that head a second time, without this field, and then the rest.
        """
        unread = [memoryview(data)]
        while unread and self._last_answer is None and not self.transport.is_closing():
            piece = unread.pop(0)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                (behind_head,) = upgrade.args
                unread = [memoryview(self._head_without_upgrade()), piece[behind_head:]]
                self.parser = _parser_for(self)
            except httptools.HttpParserError:
                self._refuse(HTTPStatus.BAD_REQUEST)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            if name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes, self._unparsed_bytes = True, 0, 0
        if not self._is_answering:  # else uvicorn may have paused reading
            self._end_after(self.patience_s)

    def on_url(self, url: bytes) -> None:
        self._make_room_for(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head; or of the trailers, of which `Connection` would end the reading."""
        self._make_room_for(len(name) + len(value))
        if self._is_in_head:
            super().on_header(name, value)
        elif name.lower() == b"connection":
            self._stop(HTTPStatus.BAD_REQUEST)

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return
        if status := self._status_of_refused_head():
            self._stop(status)
        if self.parser.should_upgrade():
            return  # it is parsed again
        if self.parser.get_http_version() == "1.0":  # whose clients know no such answer
            self.expect_100_continue = False
        super().on_headers_complete()
        self._is_in_head, self._unparsed_bytes = False, 0
        self._disarm()
        if len(self.pipeline) > MAX_WAITING:
            log.warning("a connection on which more than %d requests wait is closed", MAX_WAITING)
            self.transport.close()

    def _status_of_refused_head(self) -> HTTPStatus | None:
        """With what a complete head is refused; None if it is read. RFC 9112 wants one Host."""
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            return HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            return HTTPStatus.BAD_REQUEST
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if self.parser.get_method() == b"CONNECT" or set(codings) - {b"chunked"}:
            return HTTPStatus.NOT_IMPLEMENTED
        return None

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        if self.cycle is not None and not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """The response is complete: a head that has begun meanwhile is waited for."""
        super().on_response_complete()
        if self._last_answer is not None and not self._is_answering:
            self._end()
        elif self._is_in_head and self._timer is None:
            self._end_after(self.patience_s)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._current = cycle
        super()._start_asgi_task(cycle, app)

    def _make_room_for(self, size: int) -> None:
        self._unparsed_bytes = 0
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD:
            self._stop(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    @property
    def _is_answering(self) -> bool:
        return self._current is not None and not self._current.response_complete

    def _end_after(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._is_in_head:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
        else:
            self.transport.close()

    def _stop(self, status: HTTPStatus) -> NoReturn:
        self._refuse(status)
        raise RequestRefused(status)

    def _refuse(self, status: HTTPStatus) -> None:
        """Read no more, and end the connection once the requests before are answered; with this
        status, unless what was being read has an answer.
        """
        if self._last_answer is not None or self.transport.is_closing():
            return
        log.warning("a request was refused: %s", status.phrase)
        self._last_answer = b""
        if self._is_in_head or self._is_taken_back():
            head = f"HTTP/1.1 {status} {status.phrase}\r\nconnection: close\r\n"
            self._last_answer = f"{head}content-length: 0\r\n\r\n".encode()
        if not self._is_answering:
            self._end()

    def _is_taken_back(self) -> bool:
        """Whether the request whose body is being read has no answer; none is sent then."""
        if self.pipeline and self.pipeline[0][0] is self.cycle:  # the last that came
            self.pipeline.popleft()
            return True
        is_answered = self.cycle is None or self.cycle.response_started
        if self._is_answering:  # this one, which would wait for the rest of its body
            self.cycle.disconnected = True
            self._current = None
        return not is_answered

    def _end(self) -> None:
        if self._last_answer and not self.transport.is_closing():
            self.transport.write(self._last_answer)
        self.transport.close()


def _parser_for(protocol: BoundedHeads) -> httptools.HttpRequestParser:
    """A parser as uvicorn has it: what is sent behind `connection: close` is not read."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def bounded_heads(seconds: float) -> type[BoundedHeads]:
    """The protocol that waits `seconds` for a head to be complete, and for a client to read."""
    return type("BoundedHeads", (BoundedHeads,), {"patience_s": seconds})
