"""Files that are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.files.atomic import atomic_write, save_figures


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    with atomic_write(file) as part:
        part.write_text("first")
    with pytest.raises(KeyboardInterrupt), atomic_write(file) as part:
        part.write_text("sec")
        raise KeyboardInterrupt
    assert file.read_text() == "first"


def test_the_table_stands_beside_the_figures_and_nothing_else(tmp_path: Path) -> None:
    save_figures(tmp_path / "speed.json", '{"ms": 1}', "| ms |")
    assert (tmp_path / "speed.json").read_text() == '{"ms": 1}\n'
    assert (tmp_path / "speed.md").read_text() == "| ms |\n"
    assert len(list(tmp_path.iterdir())) == 2
