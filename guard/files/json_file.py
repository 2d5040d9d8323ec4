"""A small JSON file, whatever is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from guard.errors import GuardError
from guard.files.strict_json import in_words, read_json

MAX_BYTES = 2**20  # a card or an adapter's configuration has a few thousand


def load_json(path: Path, *, remedy: str) -> Any:
    """The value in the file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            problem = f"more than {MAX_BYTES} bytes, which no file of its kind has"
            raise GuardError(problem, where=path, remedy=remedy)
        return read_json(content.decode("utf-8"))
    except OSError as error:
        raise GuardError(f"cannot be read: {error}", where=path, remedy=remedy) from error
    except (ValueError, RecursionError) as error:
        raise GuardError(f"not valid JSON: {in_words(error)}", where=path, remedy=remedy) from error
