"""One process at a time holds a file."""

from __future__ import annotations

from pathlib import Path

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
