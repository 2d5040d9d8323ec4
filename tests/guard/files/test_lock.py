"""One process at a time holds a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.files.atomic import locked


def test_a_file_is_held_until_it_is_closed_and_keeps_its_content(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lock"
    with locked(path, "busy"):
        path.write_text("kept")
        with pytest.raises(GuardError, match=r"folder/lock: busy\. Wait for it, or end it"):
            locked(path, "busy")
    with locked(path, "busy"):
        assert path.read_text() == "kept"


def test_a_file_that_its_holder_deletes_is_held_anew(tmp_path: Path) -> None:
    """Else two processes could hold two files of one name."""
    path = tmp_path / "lock"
    deleted = locked(path, "busy")
    path.unlink()
    with locked(path, "busy"), pytest.raises(GuardError, match="busy"):
        locked(path, "busy")
    deleted.lock.release()


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GuardError, match=r"the folder cannot be held: .*can be written to"):
        locked(tmp_path / "file" / "lock", "busy")
