"""Files that are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.files.atomic import atomic_write


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    with atomic_write(file) as part:
        part.write_text("first")
    with pytest.raises(KeyboardInterrupt), atomic_write(file) as part:
        part.write_text("sec")
        raise KeyboardInterrupt
    assert file.read_text() == "first"
