"""A file that is written whole or not at all. Knows nothing of what the files hold."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """The path to write to, which then takes the place of `file`.

    A run that is cut off leaves the file that was there. Several processes, of several machines
    too, may write the same file: each its own part, and the last one stays.
    """
    part = file.with_name(f"{file.name}.{socket.gethostname()}-{os.getpid()}.part")
    try:
        yield part
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
