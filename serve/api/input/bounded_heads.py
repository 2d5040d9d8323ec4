"""How large the head of a request may be, how long it may take, how many requests may wait on a
connection, and how long a client may leave its answer unread: uvicorn bounds none of these.

A head is all that stands before a request's body; no middleware sees it before it is complete.
Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)

MAX_HEAD = 64 * 2**10  # bytes, give or take one read of the socket
MAX_WAITING = 8  # requests behind the one that is being answered


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's protocol, which also ends a connection whose head is too large or too slow, where
    too many requests wait, or whose client does not read. The trailers behind a body in chunks
    count to the head.

    A connection that says nothing is kept for `timeout_keep_alive` seconds, as uvicorn keeps one
    that has been answered.
    """

    patience_s = 60.0  # from a head's first byte to its last, and for a client that does not read

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = False
        self._head_bytes = 0  # bytes of the URL and of the complete fields
        self._unparsed_bytes = 0  # bytes since the parser's last event, of an unfinished field
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        # By the kernel: what is not sent yet outlives both the request and a close of the transport
        # that TLS may have in between.
        connection = transport.get_extra_info("socket")
        milliseconds = round(1000 * self.patience_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._end_after(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, unless a field has become too large."""
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > MAX_HEAD + len(data):
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        if self._timer is None and not self._is_in_head and not self._is_answering:
            self._end_after(self.timeout_keep_alive)  # bytes that begin no head

    def on_message_begin(self) -> None:
        """Start the timer of a head."""
        super().on_message_begin()
        self._is_in_head, self._head_bytes, self._unparsed_bytes = True, 0, 0
        if not self._is_answering:  # else uvicorn may have paused reading
            self._end_after(self.patience_s)

    def on_url(self, url: bytes) -> None:
        """A piece of the URL."""
        if self._has_room_for(len(url)):
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head, or of the trailers."""
        if self._has_room_for(len(name) + len(value)):
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._is_in_head, self._unparsed_bytes = False, 0
        self._disarm()
        if self.transport.is_closing():
            return
        super().on_headers_complete()
        if len(self.pipeline) > MAX_WAITING:
            log.warning("a connection on which more than %d requests wait is closed", MAX_WAITING)
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._unparsed_bytes = 0
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._unparsed_bytes = 0
        if self.cycle is not None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """The response is complete: a head that has begun meanwhile is waited for."""
        super().on_response_complete()
        if self._is_in_head and self._timer is None:
            self._end_after(self.patience_s)

    def _has_room_for(self, size: int) -> bool:
        self._unparsed_bytes = 0
        self._head_bytes += size
        if self._head_bytes <= MAX_HEAD:
            return True
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        return False

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

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

    def _refuse(self, status: HTTPStatus) -> None:
        """End the connection; with a response, unless another one is being written."""
        if self.transport.is_closing():
            return
        log.warning("a request's head was refused: %s", status.phrase)
        if not self._is_answering:
            head = (
                f"HTTP/1.1 {status} {status.phrase}\r\nconnection: close\r\ncontent-length: 0\r\n"
            )
            self.transport.write(f"{head}\r\n".encode())
        self.transport.close()


def bounded_heads(seconds: float) -> type[BoundedHeads]:
    """The protocol that waits `seconds` for a head to be complete, and for a client to read."""
    return type("BoundedHeads", (BoundedHeads,), {"patience_s": seconds})
