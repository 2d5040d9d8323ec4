"""A file that one process at a time holds."""

from __future__ import annotations

from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from guard.errors import GuardError


def locked(path: Path, problem: str) -> AcquireReturnProxy[FileLock]:
    """The hold of the file, until it is left or dropped, or this process ends. Its content stays.

    Raises GuardError with the `problem` if another process holds it, and where the folder cannot be
    written to or its file system knows no locks.
    """
    lock = FileLock(path, blocking=False, fallback_to_soft=False, thread_local=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return lock.acquire()
    except Timeout:
        raise GuardError(problem, where=path, remedy="Wait for it, or end it") from None
    except OSError as error:
        raise GuardError(
            f"the folder cannot be held: {error.strerror}",
            where=path,
            remedy="Use a folder that can be written to and locked",
        ) from error
