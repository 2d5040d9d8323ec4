"""A file that one process at a time holds. Knows nothing of what it keeps others off."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from guard.errors import GuardError


def locked(path: Path, problem: str) -> IO[str]:
    """The file, open and held until it is closed or this process ends. Its content stays.

    Raises GuardError with the `problem` if another process holds it, and where the folder cannot be
    written to or its file system knows no locks.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise _no_lock(path, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
    except BlockingIOError:
        file.close()
        raise GuardError(problem, where=path, remedy="Wait for it, or end it") from None
    except FileNotFoundError:
        is_there = False
    except OSError as error:
        file.close()
        raise _no_lock(path, error) from error
    if is_there:
        return file
    file.close()  # whoever held it has deleted it meanwhile
    return locked(path, problem)


def _no_lock(path: Path, error: OSError) -> GuardError:
    problem = f"the folder cannot be held: {error.strerror}"
    return GuardError(problem, where=path, remedy="Use a folder that can be written to and locked")
