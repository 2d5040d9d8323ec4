"""Which versions of which rules there are, which of them an alias names, and who decided it.

A version is one set of weights of a rule with its card. It never changes: its files lie in
`versions/ID`, and a file that two versions have in common (`make calibrate` changes the card alone)
is stored once. Training registers a version; a person publishes it. `champion` names the version
that is served, `candidate` the last one registered and not published, `previous` the champion
before. Events form a chain of hashes: one that was edited or taken out is noticed. Any number of
processes of one machine may use a registry at once.
"""

from __future__ import annotations

import contextlib
import filecmp
import getpass
import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from guard.errors import GuardError, choose_from
from guard.layout import Runs
from guard.weights.card import Card, load_card

Alias = Literal["champion", "candidate", "previous"]
EventKind = Literal["registered", "published", "rolled_back"]

SCHEMA = Path(__file__).with_name("schema.sql")
SCHEMA_VERSION = 1
LOCKED_S = 10.0  # before a registry that another process writes to is an error
SHORTEST_ID = 4  # digits that name a version
FOLDER_DIGITS = 16
FIRST = "the first version of the rule"
OF_RULE = "WHERE model = ? AND rule = ? AND method = ?"
ALIASES = f"SELECT name, version FROM alias {OF_RULE}"
VERSIONS = f"SELECT id, parent, note FROM version {OF_RULE} ORDER BY rowid"


class RegisteredRule(NamedTuple):
    """What has versions: a rule's weights on one base by one method, as a folder of `runs/`."""

    model: str
    rule: str
    method: str

    @classmethod
    def of(cls, card: Card) -> RegisteredRule:
        return cls(card.model, card.rule, card.method)

    def __str__(self) -> str:
        return "/".join(self)


@dataclass(frozen=True)
class Version:
    """One set of weights of a rule with its card; `parent` was champion when it was registered."""

    id: str
    rule: RegisteredRule
    parent: str | None
    note: str
    folder: Path


@dataclass(frozen=True)
class Event:
    """What changed, by whom and why. `hash` covers all of it and the hash of the event before."""

    number: int
    at: str  # UTC, by the machine's clock, which may run back: the number gives the order
    actor: str
    kind: EventKind
    version: str
    reason: str
    hash: str


class Registry:
    """The registry of an output folder."""

    def __init__(self, runs: Runs) -> None:
        self.root = runs.root / "registry"
        self.file = self.root / "registry.sqlite"

    def folder(self, version_id: str) -> Path:
        """Where the files of a version are."""
        return self.root / "versions" / version_id[:FOLDER_DIGITS]

    def register(self, folder: Path, *, actor: str, note: str) -> Version:
        """Keep finished weights as a version; the same ones again change nothing. The first version
        of a rule becomes its champion, any other one the candidate.

        Raises GuardError for weights that are damaged, or of a seed that is not served, and where
        the registry cannot be written.
        """
        card = load_card(folder)
        if card.seed:
            remedy = "Register seed 0, the one that is served"
            raise GuardError("weights of another seed", where=folder, got=card.seed, remedy=remedy)
        rule = RegisteredRule.of(card)
        self._store(folder, card)
        with self._changing() as changes:
            aliases = changes.aliases(rule)
            champion = aliases.get("champion")
            row = (card.version, *rule, champion, note)
            added = changes.run("INSERT OR IGNORE INTO version VALUES (?, ?, ?, ?, ?, ?)", row)
            if added.rowcount:
                changes.record(actor, "registered", card.version, note)
                if champion is None:
                    changes.name(rule, "champion", card.version)
                    changes.record(actor, "published", card.version, FIRST)
                else:
                    changes.name(rule, "candidate", card.version)
        return self.version(rule, card.version)

    def publish(
        self, rule: RegisteredRule, version: str | None = None, *, actor: str, reason: str
    ) -> Version:
        """Make a version the champion, by default the candidate.

        Raises GuardError if there is no such version, it is champion already, its weights are
        damaged, or no reason is given.
        """
        return self._change_champion(rule, version, "candidate", "published", actor, reason)

    def roll_back(
        self, rule: RegisteredRule, version: str | None = None, *, actor: str, reason: str
    ) -> Version:
        """Make an earlier version the champion again, by default the previous one. Raises as
        `publish`.
        """
        return self._change_champion(rule, version, "previous", "rolled_back", actor, reason)

    def champions(self, model: str, method: str) -> dict[str, Path]:
        """The folders of the champions on a base by a method, by rule."""
        query = "SELECT rule, version FROM alias WHERE model = ? AND method = ? AND name = ?"
        rows = self._rows(query, (model, method, "champion"))
        return {rule: self.folder(version) for rule, version in rows}

    def rules(self) -> list[RegisteredRule]:
        query = "SELECT DISTINCT model, rule, method FROM version ORDER BY rule, model, method"
        return [RegisteredRule(*row) for row in self._rows(query)]

    def aliases(self, rule: RegisteredRule) -> Mapping[Alias, str]:
        return dict(self._rows(ALIASES, rule))

    def versions(self, rule: RegisteredRule) -> list[Version]:
        """Its versions, the first one first. Raises GuardError if it has none."""
        rows = self._rows(VERSIONS, rule)
        if not rows:
            remedy = f"Run `make train` for it. {choose_from(str(rule), map(str, self.rules()))}"
            raise GuardError(f"no version of {rule}", where=self.file, remedy=remedy)
        return [Version(name, rule, parent, note, self.folder(name)) for name, parent, note in rows]

    def version(self, rule: RegisteredRule, prefix: str) -> Version:
        """The version whose id begins so. Raises GuardError for none, and for several."""
        versions = self.versions(rule)
        found = [version for version in versions if version.id.startswith(prefix)]
        if len(found) == 1 and len(prefix) >= SHORTEST_ID:
            return found[0]
        problem = f"no version of {rule} begins so"
        if found:
            problem = f"{len(found)} versions of {rule} begin so"
        known = ", ".join(version.id[:12] for version in versions)
        raise GuardError(problem, got=repr(prefix), remedy=f"It has {known}")

    def events(self) -> list[Event]:
        return [Event(*row) for row in self._rows("SELECT * FROM event ORDER BY number")]

    def verify(self, *, files: bool = True) -> None:
        """Raise GuardError for the first event that does not continue the chain, and for a version
        whose `files` are not those that were registered.
        """
        before = ""
        for number, event in enumerate(self.events(), start=1):
            if event.number != number or event.hash != _hash(before, *astuple(event)[:-1]):
                problem = f"event {number} is not the one that was written"
                remedy = "Restore the file from a copy; who could write it could change what serves"
                raise GuardError(problem, where=self.file, remedy=remedy)
            before = event.hash
        for rule in self.rules() if files else ():
            for version in self.versions(rule):
                self._check_files(version)

    def _change_champion(
        self,
        rule: RegisteredRule,
        prefix: str | None,
        by_default: Alias,
        kind: EventKind,
        actor: str,
        reason: str,
    ) -> Version:
        if not reason.strip():
            remedy = 'Give it, as WHY="fewer false alarms on refunds"'
            raise GuardError("a champion is changed for a reason", remedy=remedy)
        self.versions(rule)  # raises for a rule that has none
        with self._changing() as changes:
            aliases = changes.aliases(rule)
            if prefix is None and by_default not in aliases:
                remedy = "Name one with VERSION=; `make rules` lists them"
                raise GuardError(f"{rule} has no {by_default} version", remedy=remedy)
            version = self.version(rule, aliases[by_default] if prefix is None else prefix)
            champion = aliases["champion"]
            if version.id == champion:
                remedy = "`make rules` lists the others"
                raise GuardError(f"{rule}: it is champion already", got=prefix, remedy=remedy)
            self._check_files(version)
            changes.name(rule, "previous", champion)
            changes.name(rule, "champion", version.id)
            if aliases.get("candidate") == version.id:
                changes.unname(rule, "candidate")
            changes.record(actor, kind, version.id, reason)
        return version

    def _check_files(self, version: Version) -> None:
        card = load_card(version.folder)
        if card.version != version.id:
            problem = "the files are of another version"
            raise GuardError(problem, where=version.folder, got=card.version[:12])

    def _store(self, source: Path, card: Card) -> None:
        """Copy the files of finished weights to their place, all or none of them. A place whose
        files are damaged is filled again.
        """
        place = self.folder(card.version)
        with contextlib.suppress(GuardError):
            load_card(place)
            return
        part = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            for file in source.iterdir():
                if file.is_file():
                    self._copy(file, part / file.name)
            _to_disk(part)
            shutil.rmtree(place, ignore_errors=True)
            part.rename(place)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            problem = f"the version cannot be stored: {error.strerror}"
            remedy = "Make room on the disk, or let the folder be written to, and repeat"
            raise GuardError(problem, where=place, remedy=remedy) from error

    def _copy(self, file: Path, target: Path) -> None:
        """Copy one file, not to be written to; of one that another version has make a link."""
        for other in self.root.glob(f"versions/*/{file.name}"):
            if filecmp.cmp(file, other, shallow=False):
                os.link(other, target)
                return
        shutil.copyfile(file, target)
        target.chmod(0o444)
        with target.open("rb") as copied:
            os.fsync(copied.fileno())

    def _rows(self, query: str, values: tuple[object, ...] = ()) -> list[Any]:
        """What a query finds; nothing, and nothing is made, where there is no registry."""
        if not self.file.exists():
            return []
        connect = self._connection if os.access(self.root, os.W_OK) else self._fixed
        with self._errors(), contextlib.closing(connect()) as connection:
            return connection.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Changes]:
        """A transaction, which no other one overlaps."""
        with self._errors(), contextlib.closing(self._connection()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield _Changes(connection)
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def _connection(self) -> sqlite3.Connection:
        self.root.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.file, timeout=LOCKED_S, isolation_level=None)
        try:
            connection.executescript(
                "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;"
            )
            self._make_tables(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _fixed(self) -> sqlite3.Connection:
        """For a folder that is mounted read-only, where SQLite cannot take part in a journal. Who
        writes elsewhere leaves the file whole; amid that a read may fail, and is to be repeated.
        """
        return sqlite3.connect(f"{self.file.absolute().as_uri()}?immutable=1", uri=True)

    def _make_tables(self, connection: sqlite3.Connection) -> None:
        """Give a new file its tables. Raises GuardError for a file of a newer program."""
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:  # another process may make them at the same time, or was killed amid it
            script = SCHEMA.read_text(encoding="utf-8")
            connection.executescript(f"{script} PRAGMA user_version = {SCHEMA_VERSION};")
        elif version > SCHEMA_VERSION:
            problem = "the registry was written by a newer version of this program"
            remedy = "Update this checkout, or use another output folder"
            raise GuardError(problem, where=self.file, got=version, remedy=remedy)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """SQLite's errors as GuardErrors."""
        try:
            yield
        except sqlite3.OperationalError as error:
            problem = f"the registry cannot be used: {error}"
            remedy = "If another process holds it, wait for that; else look at disk and rights"
            raise GuardError(problem, where=self.file, remedy=remedy) from error
        except sqlite3.DatabaseError as error:
            problem = f"the registry is damaged: {error}"
            remedy = "Restore the file from a copy; the versions lie beside it, untouched"
            raise GuardError(problem, where=self.file, remedy=remedy) from error


class _Changes:
    """The statements of one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def run(self, statement: str, values: tuple[object, ...]) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    def aliases(self, rule: RegisteredRule) -> dict[Alias, str]:
        return dict(self.run(ALIASES, rule).fetchall())

    def name(self, rule: RegisteredRule, alias: Alias, version: str) -> None:
        self.run("INSERT OR REPLACE INTO alias VALUES (?, ?, ?, ?, ?)", (*rule, alias, version))

    def unname(self, rule: RegisteredRule, alias: Alias) -> None:
        self.run(f"DELETE FROM alias {OF_RULE} AND name = ?", (*rule, alias))

    def record(self, actor: str, kind: EventKind, version: str, reason: str) -> None:
        """Add an event to the chain."""
        last = self.run("SELECT number, hash FROM event ORDER BY number DESC LIMIT 1", ())
        number, before = last.fetchone() or (0, "")
        at = datetime.now(UTC).isoformat(timespec="seconds")
        event = (number + 1, at, actor, kind, version, reason)
        self.run("INSERT INTO event VALUES (?, ?, ?, ?, ?, ?, ?)", (*event, _hash(before, *event)))


def user_name() -> str:
    """Who runs this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"user {os.getuid()}"


def _hash(before: str, *event: object) -> str:
    """Of an event, whose hash field is left out, and of the hash of the one before it."""
    return hashlib.sha256(json.dumps([before, *event], ensure_ascii=False).encode()).hexdigest()


def _to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
