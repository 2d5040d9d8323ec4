"""Figures and their table are written side by side."""

from __future__ import annotations

from pathlib import Path

from guard.files.figures import save_figures


def test_the_table_stands_beside_the_figures_and_nothing_else(tmp_path: Path) -> None:
    save_figures(tmp_path / "speed.json", '{"ms": 1}', "| ms |")
    assert (tmp_path / "speed.json").read_text() == '{"ms": 1}\n'
    assert (tmp_path / "speed.md").read_text() == "| ms |\n"
    assert len(list(tmp_path.iterdir())) == 2
