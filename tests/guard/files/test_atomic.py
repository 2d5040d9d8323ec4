"""Files that are whole or not there, and files that one process at a time holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.files.atomic import atomic_write, locked, save_figures


def test_files_are_written_whole_or_stay_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    with atomic_write(file) as part:
        part.write_text("first")
    with pytest.raises(KeyboardInterrupt), atomic_write(file) as part:
        part.write_text("sec")
        raise KeyboardInterrupt
    assert file.read_text() == "first"
    save_figures(tmp_path / "speed.json", '{"ms": 1}', "| ms |")
    assert (tmp_path / "speed.json").read_text() == '{"ms": 1}\n'
    assert (tmp_path / "speed.md").read_text() == "| ms |\n"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"state.json", "speed.json", "speed.md"}


def test_a_file_is_held_until_it_is_closed_and_anew_if_its_holder_deletes_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "folder" / "lock"
    with locked(path, "busy"):
        path.write_text("kept")
        with pytest.raises(GuardError, match=r"folder/lock: busy\. Wait for it, or end it"):
            locked(path, "busy")
    with locked(path, "busy"):
        assert path.read_text() == "kept"
    # Else two processes could hold two files of one name.
    path = tmp_path / "lock"
    deleted = locked(path, "busy")
    path.unlink()
    with locked(path, "busy"), pytest.raises(GuardError, match="busy"):
        locked(path, "busy")
    deleted.lock.release()
    (tmp_path / "link").symlink_to(path)
    with locked(tmp_path / "link", "busy"), pytest.raises(GuardError, match="busy"):
        locked(path, "busy")
    (tmp_path / "file").touch()
    with pytest.raises(GuardError, match=r"the folder cannot be held: .*can be written to"):
        locked(tmp_path / "file" / "lock", "busy")
