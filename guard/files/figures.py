"""Measured figures as two files: JSON, and a table in Markdown beside it."""

from __future__ import annotations

from pathlib import Path

from guard.files.atomic import atomic_write


def save_figures(path: Path, figures: str, table: str) -> None:
    """Write JSON to `path` and Markdown beside it, each whole or not at all."""
    for file, content in ((path, figures), (path.with_suffix(".md"), table)):
        with atomic_write(file) as part:
            part.write_text(content + "\n", encoding="utf-8")
