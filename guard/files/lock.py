"""A file that one process at a time holds. Knows nothing of what it keeps others off."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from guard.errors import GuardError


def locked(path: Path, problem: str) -> IO[str]:
    """The file, open and held until it is closed or this process ends. Its content stays.

    Raises GuardError with the `problem` if another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise GuardError(problem, where=path, remedy="Wait for it, or end it") from None
    return file
