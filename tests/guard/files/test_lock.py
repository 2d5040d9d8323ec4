"""One process at a time holds a file."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

import pytest

from guard.errors import GuardError
from guard.files.lock import locked


def test_a_file_is_held_until_it_is_closed_and_keeps_its_content(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lock"
    with locked(path, "busy"):
        path.write_text("kept")
        with pytest.raises(GuardError, match=r"folder/lock: busy\. Wait for it, or end it"):
            locked(path, "busy")
    with locked(path, "busy"):
        assert path.read_text() == "kept"


def test_a_file_that_its_holder_deletes_meanwhile_is_held_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two processes hold two files of one name."""
    path = tmp_path / "lock"
    flock = fcntl.flock
    deleted: list[Path] = []

    def flock_of_a_deleted_file(file: IO[str], operation: int) -> None:
        if not deleted:
            path.unlink()
            deleted.append(path)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_of_a_deleted_file)
    with locked(path, "busy"), pytest.raises(GuardError, match="busy"):
        locked(path, "busy")
    assert deleted
