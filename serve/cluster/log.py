"""The log lines of replicas on the stderr of the server that started them.

A named pipe, because Ray would mix them with its own. Knows nothing of Ray.
"""

from __future__ import annotations

import contextlib
import logging
import logging.config
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from serve.api.observe.server_log import configuration

END = b"\0end\n"  # a line that no log contains


@contextlib.contextmanager
def relayed(pipe: Path) -> Iterator[None]:
    """Copy to stderr what others write into the pipe, which is made here."""
    os.mkfifo(pipe, 0o600)
    # Open for writing too, else the first writer that ends would end the reading.
    descriptor = os.open(pipe, os.O_RDWR)
    thread = threading.Thread(target=_copy, args=(descriptor,), name="replica-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(descriptor, END)
        thread.join()
        os.close(descriptor)


def _copy(descriptor: int) -> None:
    with os.fdopen(os.dup(descriptor), "rb") as lines:
        for line in lines:
            if line.endswith(END):
                return
            # stderr is closed. Unread, the pipe would fill, and those who log would block.
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(line.decode(errors="replace"))
                sys.stderr.flush()


def log_into(pipe: Path) -> None:
    """Log as the server does, into the pipe."""
    settings = configuration()
    stream = pipe.open("w", buffering=1, encoding="utf-8")
    settings["handlers"]["stderr"]["stream"] = stream
    logging.config.dictConfig(settings)
