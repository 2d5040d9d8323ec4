"""A file that is written whole or not at all."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """The path to write to, which then takes the place of `file`: a run that is cut off leaves the
    file that was there. Several processes, of several machines too, may write the same file; the
    last one stays.
    """
    part = file.with_name(f"{file.name}.{socket.gethostname()}-{os.getpid()}.part")
    try:
        yield part
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def save_figures(path: Path, figures: str, table: str) -> None:
    """Write JSON to `path` and Markdown beside it, each whole or not at all."""
    for file, content in ((path, figures), (path.with_suffix(".md"), table)):
        with atomic_write(file) as part:
            part.write_text(content + "\n", encoding="utf-8")
