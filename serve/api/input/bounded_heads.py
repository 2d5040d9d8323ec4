"""How long a connection is waited for: until a request's head is complete, and until a client reads
its answer. uvicorn bounds neither. What a request is, and how large its head may be, h11 says.
"""

from __future__ import annotations

import asyncio
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEAD = 64 * 2**10  # bytes, as uvicorn is told


class BoundedHeads(H11Protocol):
    """uvicorn's protocol, which also closes a connection that is silent before its first request,
    whose head takes too long, or whose client sends on behind an answer, or does not read it.
    """

    patience_s = 60.0  # from a head's first byte to its last, and for a client that does not read
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # By the kernel: what is not sent yet outlives both the request and a close of the transport
        # that TLS may have in between.
        connection = transport.get_extra_info("socket")
        milliseconds = round(1000 * self.patience_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._timer = self.loop.call_later(self.patience_s, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is not h11.MUST_CLOSE:  # what stands behind `close` is not read
            super().data_received(data)
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Unless an answer is on its way: then the connection is closed without its end."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _should_upgrade(self) -> bool:
        return False  # and says nothing of it: many clients ask, and are answered in HTTP/1.1

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Let the time run where uvicorn's own does not: while a head is incomplete or not begun,
        or a body comes that nobody reads.
        """
        has_begun = bool(self.conn.trailing_data[0])
        is_idle = self.conn.their_state is h11.IDLE
        waits_for_head = is_idle and (has_begun or self.timeout_keep_alive_task is None)
        is_unread = self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        if not waits_for_head and not is_unread:
            self._disarm()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.patience_s, self.transport.close)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bounded_heads(seconds: float) -> type[BoundedHeads]:
    """The protocol that waits `seconds` for a head to be complete, and for a client to read."""
    return type("BoundedHeads", (BoundedHeads,), {"patience_s": seconds})
