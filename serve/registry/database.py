"""A file of SQLite that several processes use at once. Knows nothing of what is in it.

It is no WAL, which a read-only mount cannot read. What is deleted is overwritten.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guard.errors import GuardError

LOCKED_S = 10.0  # before a file that another process writes to is an error


@dataclass(frozen=True)
class Database:
    """A file with the tables of `schema`, which is that of a `version`.

    `name` is what errors call it, `restore` what to do where it is damaged.
    """

    file: Path
    schema: Path
    version: int
    name: str
    restore: str

    def rows(self, query: str, values: Any = ()) -> list[Any]:
        """What a query finds; nothing, and nothing is made, where there is no file."""
        if not self.file.exists():
            return []
        with self.errors(), self._connected(f"{self.file.absolute().as_uri()}?mode=rw") as reading:
            if not self._schema_version(reading):
                return []
            return reading.execute(query, values).fetchall()

    @contextlib.contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, which no other one overlaps."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            remedy = "Let the output folder be written to"
            where = self.file.parent
            raise GuardError(f"{error.strerror}", where=where, remedy=remedy) from error
        with self.errors(), self._connected(self.file.absolute().as_uri()) as connection:
            if not self._schema_version(connection):  # of a new file
                script = self.schema.read_text(encoding="utf-8")
                version = f"PRAGMA user_version = {self.version};"
                connection.executescript(f"BEGIN IMMEDIATE; {script} {version} COMMIT;")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Errors of SQLite and the file system as GuardErrors."""
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            problem = f"the {self.name} cannot be used: {error}"
            remedy = "If another process holds it, wait for that; else look at disk and rights"
            raise GuardError(problem, where=self.file, remedy=remedy) from error
        except sqlite3.DatabaseError as error:
            problem = f"the {self.name} is damaged: {error}"
            raise GuardError(problem, where=self.file, remedy=self.restore) from error

    @contextlib.contextmanager
    def _connected(self, uri: str) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(uri, uri=True, timeout=LOCKED_S, isolation_level=None)
        with contextlib.closing(connection):
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA secure_delete = ON")
            yield connection

    def _schema_version(self, connection: sqlite3.Connection) -> int:
        """0 for a new file. Raises GuardError for one of a newer program."""
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > self.version:
            problem = f"the {self.name} was written by a newer version of this program"
            remedy = "Update this checkout, or use another output folder"
            raise GuardError(problem, where=self.file, got=version, remedy=remedy)
        return int(version)
