"""The file that keeps answers as they come."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from guard.errors import GuardError
from guard.files.atomic import locked
from guard.files.strict_json import read_json


class KeptRow(Protocol):
    """What an AnswerFile keeps: a frozen dataclass of JSON values, with the key it is found by."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> str: ...


RowT = TypeVar("RowT", bound=KeptRow)


class AnswerFile(Generic[RowT]):
    """Rows by key in an append-only JSON-lines file: nothing is computed or paid for twice, even
    after a kill. The key is a hash of everything that the answer depends on; a row that no longer
    matches is never looked up.
    """

    def __init__(self, path: Path, row_type: type[RowT]) -> None:
        self.path = path
        self._row_type = row_type
        self._rows: dict[str, RowT] = {}
        self._is_whole = False  # whether a half line at the end was cut off
        if path.is_file():
            self._read()

    def get(self, key: str) -> RowT | None:
        return self._rows.get(key)

    def rows(self) -> list[RowT]:
        return list(self._rows.values())

    def add(self, rows: list[RowT]) -> None:
        """Keep `rows` for good: they are with the system before this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._is_whole:
            self._drop_torn_end()
        with self.path.open("a", encoding="utf-8") as file:
            for row in rows:
                # ASCII: half of a surrogate pair could not be written otherwise.
                file.write(json.dumps(asdict(row)) + "\n")
                self._rows[row.key] = row

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While answers are paid for: no other command asks for the same ones."""
        with locked(self.path, "another command is asking, and paying, for these answers"):
            self._drop_torn_end()
            self._read()
            yield

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)
        self._rows.clear()

    def _read(self) -> None:
        for number, line in enumerate(self.path.read_bytes().split(b"\n")[:-1], start=1):
            try:
                row = self._row_type(**read_json(line))
            except (ValueError, TypeError) as error:
                problem = f"not a kept answer: {error}"
                remedy = "Delete that line"
                raise GuardError(problem, where=f"{self.path}:{number}", remedy=remedy) from error
            self._rows[row.key] = row

    def _drop_torn_end(self) -> None:
        """Cut off the half line that a kill leaves: the next row must not be glued to it."""
        self._is_whole = True
        content = self.path.read_bytes() if self.path.is_file() else b""
        end_of_rows = content.rfind(b"\n") + 1
        if end_of_rows < len(content):
            with self.path.open("r+b") as file:
                file.truncate(end_of_rows)
