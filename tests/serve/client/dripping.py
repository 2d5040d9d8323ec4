"""A server whose answers never end: a byte at a time, for ever. Tests only."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
PAUSE_S = 0.05


@contextmanager
def dripping() -> Iterator[str]:
    """The address of one, for one connection."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_drip, args=(listener, is_over))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            is_over.set()
            thread.join()


def _drip(listener: socket.socket, is_over: threading.Event) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(HEAD)
        while not is_over.wait(PAUSE_S):
            try:
                connection.sendall(b" ")
            except OSError:  # the client has given up
                return
