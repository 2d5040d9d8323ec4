"""A file that is written whole or not at all, and one that one process at a time holds."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from guard.errors import GuardError


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """The path to write to, which then takes the place of `file`: a run that is cut off leaves the
    old file. Several processes may write the same file; the last one stays.
    """
    part = file.with_name(f"{file.name}.{socket.gethostname()}-{os.getpid()}.part")
    try:
        yield part
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def save_figures(path: Path, figures: str, table: str) -> None:
    for file, content in ((path, figures), (path.with_suffix(".md"), table)):
        with atomic_write(file) as part:
            part.write_text(content + "\n", encoding="utf-8")


def locked(path: Path, problem: str) -> AcquireReturnProxy[FileLock]:
    """The hold of the file, until it is left or dropped, or this process ends. Its content stays.

    Raises GuardError with the `problem` if another process holds it, and where the folder cannot be
    written to or its file system knows no locks.
    """
    path = path.resolve()  # a link is not opened as one
    lock = FileLock(path, blocking=False, fallback_to_soft=False, thread_local=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return lock.acquire()
    except Timeout:
        raise GuardError(problem, where=path, remedy="Wait for it, or end it") from None
    except OSError as error:
        problem = f"the folder cannot be held: {error.strerror}"
        remedy = "Use a folder that can be written to and locked"
        raise GuardError(problem, where=path, remedy=remedy) from error
