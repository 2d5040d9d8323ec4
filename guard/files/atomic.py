"""A file that is written whole or not at all. Knows nothing of what the files hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """The path to write to, which then takes the place of `file`.

    A run that is cut off leaves the file that was there.
    """
    part = file.with_name(f"{file.name}.part")
    yield part
    part.replace(file)
