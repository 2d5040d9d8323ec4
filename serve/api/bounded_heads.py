"""How large the head of a request may be, and how long it may take: uvicorn bounds neither.

A head is all that stands before a request's body; no middleware sees it before it is complete.
Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)

MAX_HEAD = 64 * 2**10  # bytes, give or take what is read of a socket at once


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's protocol, which also ends a connection whose head is too large or too slow.

    A connection that says nothing is kept for `timeout_keep_alive` seconds, as uvicorn keeps one
    that has been answered.
    """

    head_s = 60.0  # seconds from a head's first byte to its last

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes: int | None = None  # of the head that is being read; None: of none
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._end_after(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, unless the head is too large now."""
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self._timer is None and not self._is_answering:  # bytes that begin no head
            self._end_after(self.timeout_keep_alive)

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._head_bytes = 0
        self._end_after(self.head_s)

    def on_headers_complete(self) -> None:
        """It is complete."""
        self._head_bytes = None
        self._disarm()
        super().on_headers_complete()

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
        if self._head_bytes is None:
            self.transport.close()
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)

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
    """The protocol for heads that are complete within `seconds` of their first byte."""
    return type("BoundedHeads", (BoundedHeads,), {"head_s": seconds})
