"""Which versions of which rules there are, which of them an alias names, and who decided it.

A version is one set of weights of a rule with its card. It never changes: its files lie in
`versions/ID`, and a file that two versions have in common (`make calibrate` changes the card alone)
is stored once. Training registers a version; a person publishes it. `champion` names the version
that is served, `candidate` the one trained last, unless that is served, `previous` the champion
before. A version may be on trial beside the champion (`rollout.py`); another champion ends that.
Events form a chain of hashes: one that was edited or taken out amid them is noticed, a cut end
where somebody has noted the last hash. Any number of processes of one machine may use a registry at
once, and readers of others (`database.py`).
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import json
import os
import pwd
import shutil
import sqlite3
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from guard.errors import GuardError, choose_from
from guard.layout import Runs
from guard.rule import Gate
from guard.weights.card import ZERO, Card, load_card
from serve.registry.database import Database
from serve.registry.rollout import ENFORCE, OFF, SHOWN_DIGITS, Mode, Rollout, TrialVersion

Alias = Literal["champion", "candidate", "previous"]
EventKind = Literal["registered", "approved", "published", "rolled_back", "mode_set", "aborted"]

SCHEMA = Path(__file__).with_name("schema.sql")
SCHEMA_VERSION = 1
CHANGE_COUNTER = 24  # its place in the file (https://www.sqlite.org/fileformat.html)
SHORTEST_ID = 4  # digits that name a version
FOLDER_DIGITS = 16
PART = ".part-"
FIRST = "the first version of the rule"
ANEW = "the rule's words changed, or its reader"
OUTDATED = "this program cannot serve the champion any more"
SERVED_WITH = ("prompt_hash", "answer_hash", "base", "base_revision")  # of a card
RESTORE = "Restore the file from a copy; who could write it could change what is served"
DAMAGED = "Restore the file from a copy; the versions lie beside it, untouched"
STALE_S = 24 * 3600.0  # after which what a killed process has left is deleted
OF_RULE = "WHERE model = ? AND rule = ? AND method = ?"
ALIASES = f"SELECT name, version FROM alias {OF_RULE}"
MODES = f"SELECT is_trial, event FROM mode {OF_RULE}"
APPROVING = "SELECT actor FROM event WHERE kind = 'approved' AND version = ?"
CROWNED = "FROM event WHERE kind IN ('published', 'rolled_back')"
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
    mode: str  # that it was set to, with its gate, or empty
    gate: str
    reason: str
    hash: str


class Registry:
    """The registry of an output folder."""

    def __init__(self, runs: Runs) -> None:
        self.root = runs.root / "registry"
        self.file = self.root / "registry.sqlite"
        self._database = Database(self.file, SCHEMA, SCHEMA_VERSION, "registry", DAMAGED)
        self._state = b""  # of the file, when the rollouts were read
        self._rollouts: dict[RegisteredRule, Rollout] = {}

    def folder(self, version_id: str) -> Path:
        """Where the files of a version are."""
        return self.root / "versions" / version_id[:FOLDER_DIGITS]

    def register(
        self, folder: Path, *, actor: str, note: str, follows_zero: bool = True
    ) -> Version:
        """Keep finished weights as a version. It becomes the champion where there is none, or none
        that this version's program can serve; otherwise, unless it is champion, the candidate. The
        first weights of a rule replace a version 0 where it `follows_zero`, else a person decides.

        Raises GuardError for weights that are damaged, or of a seed that is not served, and where
        the registry cannot be written.
        """
        card = load_card(folder)
        if card.seed:
            remedy = "Register seed 0, the one that is served"
            raise GuardError("weights of another seed", where=folder, got=card.seed, remedy=remedy)
        return self._registered(card, folder, actor, note, follows_zero=follows_zero)

    def register_zero(self, card: Card, weights: Path | None, *, actor: str, note: str) -> Version:
        """Keep a rule's version 0, by the weights of a reader or by none. It becomes the champion
        unless weights of the rule's own are; a candidate it never is. Raises as `register`.
        """
        return self._registered(card, weights, actor, note)

    def _registered(
        self, card: Card, weights: Path | None, actor: str, note: str, *, follows_zero: bool = True
    ) -> Version:
        rule = RegisteredRule.of(card)
        with self._changing() as changes:
            self._store(weights, card)
            aliases = changes.aliases(rule)
            champion = aliases.get("champion")
            is_first = champion is None or changes.follows_zero(champion, rule, card)
            is_first &= champion is None or (follows_zero and not card.worse_than_reader)
            row = (card.version, *rule, champion, note)
            if changes.run("INSERT OR IGNORE INTO version VALUES (?, ?, ?, ?, ?, ?)", row).rowcount:
                changes.record(actor, "registered", card.version, note)
            reason = ANEW if champion and card.untrained else FIRST
            if card.version == champion:
                changes.unname(rule, "candidate")
            elif champion is None or is_first or self._is_outdated(champion, card):
                changes.crown(rule, card.version, champion)
                changes.record(actor, "published", card.version, reason if is_first else OUTDATED)
            elif card.untrained is None:
                changes.name(rule, "candidate", card.version)
        return self.version(rule, card.version)

    def publish(
        self,
        rule: RegisteredRule,
        version: str,
        *,
        actor: str,
        reason: str,
        back: bool = False,
        champion: str | None = None,
        approvals: int = 1,
    ) -> int:
        """Make the version whose id begins so the champion; `back`: as a step back. With fewer
        `approvals` of different actors since the last champion came, count this one alone.

        How many it has now. Raises GuardError if there is no such version, it is champion already,
        its weights are damaged, no reason is given, or it is not this `champion` that it replaces.
        """
        _check_reason(reason)
        chosen = self.version(rule, version)
        with self._changing() as changes:
            aliases = changes.aliases(rule)
            now = aliases["champion"]
            if chosen.id == now:
                remedy = "`make rules` lists the others"
                raise GuardError(f"{rule}: it is champion already", got=version, remedy=remedy)
            if champion is not None and not now.startswith(champion):
                remedy, got = "Look at what was decided since, and decide again", now[:SHOWN_DIGITS]
                raise GuardError(f"{rule}: the champion is another", got=got, remedy=remedy)
            self._check_files(chosen)
            before = changes.approving(rule, chosen.id)
            if len(before | {actor}) < approvals:
                if actor not in before:
                    changes.record(actor, "approved", chosen.id, reason)
                return len(before | {actor})
            changes.crown(rule, chosen.id, now)
            kind: EventKind = "rolled_back" if back else "published"
            changes.record(actor, kind, chosen.id, reason)
        return len(before | {actor})

    def revert(
        self,
        version: Version,
        aliases: Mapping[Alias, str],
        trial: TrialVersion | None,
        *,
        actor: str,
        reason: str,
    ) -> None:
        """Take a champion back: the aliases and the trial are again as they were before it. Nothing
        changes where it is champion no longer; a candidate that came meanwhile stays.
        """
        rule, champion = version.rule, aliases["champion"]
        with self._changing() as changes:
            if changes.aliases(rule)["champion"] != version.id or champion == version.id:
                return
            changes.crown(rule, champion, None)
            changes.unname(rule, "previous")
            for alias, named in {**aliases, **changes.aliases(rule)}.items():
                changes.name(rule, alias, named)
            changes.record(actor, "rolled_back", champion, reason)
            if trial is not None:
                restored = trial.version, reason, trial.mode, trial.gate
                number = changes.record(actor, "mode_set", *restored)
                changes.set_mode(rule, trial.mode, number, is_trial=True)

    def set_mode(
        self, rule: RegisteredRule, version: str, mode: Mode, *, gate: Gate, actor: str, reason: str
    ) -> Version:
        """Set the mode of the champion, or of another version, which is on trial from then on.

        Raises GuardError if there is no such version, its weights are damaged, another one is on
        trial, it is to be enforced and is no champion, or no reason is given.
        """
        _check_reason(reason)
        chosen = self.version(rule, version)
        name = chosen.id[:SHOWN_DIGITS]
        with self._changing() as changes:
            is_trial = chosen.id != changes.aliases(rule)["champion"]
            if is_trial and mode == ENFORCE:
                remedy = "`make publish` makes it the champion"
                raise GuardError(f"{rule}: only a champion is enforced", got=name, remedy=remedy)
            other = changes.on_trial(rule)
            if is_trial and other is not None and other[0] != chosen.id:
                remedy = f"Take it back first: MODE=off VERSION={other[0][:SHOWN_DIGITS]}"
                raise GuardError(f"{rule}: another version is on trial", got=name, remedy=remedy)
            self._check_files(chosen)
            number = changes.record(actor, "mode_set", chosen.id, reason, mode, gate)
            changes.set_mode(rule, mode, number, is_trial=is_trial)
        return chosen

    def abort(self, rule: RegisteredRule, trial: TrialVersion, *, actor: str, reason: str) -> None:
        """Take a version on trial back; nothing changes where that trial is over already."""
        with self._changing() as changes:
            if changes.on_trial(rule) == (trial.version, trial.since):
                number = changes.record(actor, "aborted", trial.version, reason, OFF, trial.gate)
                changes.set_mode(rule, OFF, number, is_trial=True)

    def rollout(self, rule: RegisteredRule) -> Rollout | None:
        """What of a rule is to be served; None if it has no version. Asked again and again, it
        reads the file when it has changed.
        """
        self._read_changes()
        return self._rollouts.get(rule)

    def champions(self, model: str, method: str) -> dict[str, Path]:
        """The folders of the champions on a base by a method, by rule."""
        self._read_changes()
        champions: dict[str, Path] = {}
        for rule, rollout in self._rollouts.items():
            if (rule.model, rule.method) == (model, method):
                champions[rule.rule] = rollout.folder
        return champions

    def _read_changes(self) -> None:
        state = b""
        if self.file.exists():
            with self._database.errors(), self.file.open("rb") as file:
                state = os.pread(file.fileno(), 4, CHANGE_COUNTER)
        if state == self._state:
            return
        champions = "SELECT model, rule, method, version FROM alias WHERE name = 'champion'"
        columns = "model, rule, method, is_trial, number, version, event.mode, gate"
        modes = f"SELECT {columns} FROM mode JOIN event ON event = number"
        found: dict[RegisteredRule, Rollout] = {}
        for *rule, version in self._database.rows(champions):
            found[RegisteredRule(*rule)] = Rollout(folder=self.folder(version))
        for *rule, is_trial, number, version, mode, gate in self._database.rows(modes):
            of_rule = RegisteredRule(*rule)
            change: dict[str, object] = {"mode": Mode.parse(mode)}
            if is_trial:
                change |= {"version": version, "folder": self.folder(version), "since": number}
                limits = Gate.model_validate_json(gate)
                change = {"trial": TrialVersion.model_validate(change | {"gate": limits})}
            found[of_rule] = found[of_rule].model_copy(update=change)
        self._state, self._rollouts = state, found

    def rules(self) -> list[RegisteredRule]:
        query = "SELECT DISTINCT model, rule, method FROM version ORDER BY rule, model, method"
        return [RegisteredRule(*row) for row in self._database.rows(query)]

    def aliases(self, rule: RegisteredRule) -> Mapping[Alias, str]:
        return dict(self._database.rows(ALIASES, rule))

    def versions(self, rule: RegisteredRule) -> list[Version]:
        """Its versions, the first one first. Raises GuardError if it has none."""
        rows = self._database.rows(VERSIONS, rule)
        if not rows:
            remedy = f"Run `make train` for it. {choose_from(str(rule), map(str, self.rules()))}"
            raise GuardError(f"no version of {rule}", where=self.file, remedy=remedy)
        return [Version(name, rule, parent, note, self.folder(name)) for name, parent, note in rows]

    def version(self, rule: RegisteredRule, named: str) -> Version:
        """The version of this alias, or whose id begins so. Raises GuardError for none, and for
        several.
        """
        versions = self.versions(rule)
        prefix = dict(self._database.rows(ALIASES, rule)).get(named, named)
        found = [version for version in versions if version.id.startswith(prefix)]
        if len(found) == 1 and len(prefix) >= SHORTEST_ID:
            return found[0]
        problem = f"no version of {rule} begins so"
        if found:
            problem = f"{len(found)} versions of {rule} begin so"
        known = ", ".join(version.id[:12] for version in versions)
        raise GuardError(problem, got=repr(prefix), remedy=f"It has {known}")

    def was_champion(self, version: Version) -> bool:
        return bool(self._database.rows(f"SELECT 1 {CROWNED} AND version = ?", (version.id,)))

    def events(self) -> list[Event]:
        return [Event(*row) for row in self._database.rows("SELECT * FROM event ORDER BY number")]

    def verify(self, *, files: bool = True) -> None:
        """Raise GuardError for the first event that does not continue the chain, a champion or a
        mode that no event made, and a version whose `files` are not those that were registered.
        """
        rule_of = {version.id: rule for rule in self.rules() for version in self.versions(rule)}
        decided = _Decided()
        before = ""
        for number, event in enumerate(self.events(), start=1):
            if event.number != number or event.hash != _hash(before, *astuple(event)[:-1]):
                problem = f"event {number} is not the one that was written"
                raise GuardError(problem, where=self.file, remedy=RESTORE)
            before = event.hash
            decided.follow(event, rule_of[event.version])
        for rule in self.rules():
            champion = self.aliases(rule).get("champion")
            modes = {
                bool(is_trial): number for is_trial, number in self._database.rows(MODES, rule)
            }
            if (champion, modes) != decided.of(rule):
                problem = f"no event made the champion of {rule} or set its modes"
                raise GuardError(problem, where=self.file, remedy=RESTORE)
            for version in self.versions(rule) if files else ():
                self._check_files(version)

    def _is_outdated(self, champion: str, card: Card) -> bool:
        """Whether the program that wrote the card cannot serve the champion."""
        try:
            served = load_card(self.folder(champion))
        except GuardError:
            return True
        return any(getattr(served, name) != getattr(card, name) for name in SERVED_WITH)

    def _check_files(self, version: Version) -> None:
        card = load_card(version.folder)
        if card.version != version.id:
            problem = "the files are of another version"
            raise GuardError(problem, where=version.folder, got=card.version[:12])

    def _store(self, source: Path | None, card: Card) -> None:
        """Copy the files of weights, if any, and the card to their place, all or none. One whose
        files are damaged is filled again. Only in a transaction: nobody else does it meanwhile.
        """
        place = self.folder(card.version)
        with contextlib.suppress(GuardError):
            load_card(place)
            return
        try:
            place.parent.mkdir(exist_ok=True)
            for left in self.root.glob(f"{PART}*"):  # by killed processes
                if time.time() - left.stat().st_mtime > STALE_S:
                    shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=self.root, prefix=PART) as scratch:
                part = Path(scratch) / "version"
                part.mkdir()
                for file in source.iterdir() if source is not None else ():
                    if file.is_file():
                        self._copy(file, part / file.name)
                if card.untrained is not None:
                    card.save(part)  # in the place of the reader's
                if load_card(part).version != card.version:
                    remedy = "Wait for whoever writes there, and repeat"
                    raise GuardError("the weights have changed", where=source, remedy=remedy)
                _to_disk(part)
                shutil.rmtree(place, ignore_errors=True)
                part.rename(place)
            _to_disk(place.parent)
        except OSError as error:
            problem = f"the version cannot be stored: {error.strerror}"
            remedy = "Make room on the disk, or let the folder be written to, and repeat"
            raise GuardError(problem, where=place, remedy=remedy) from error

    def _copy(self, file: Path, target: Path) -> None:
        """Copy one file, not to be written to; of one that another version has make a link."""
        for other in self.root.glob(f"versions/*/{file.name}"):
            if filecmp.cmp(file, other, shallow=False):
                with contextlib.suppress(OSError):  # of another user, or a file system without
                    os.link(other, target)
                    return
        shutil.copyfile(file, target)
        target.chmod(0o444)
        with target.open("rb") as copied:
            os.fsync(copied.fileno())

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Changes]:
        with self._database.changing() as connection:
            yield _Changes(connection)


class _Decided:
    """The champions and the modes that events made, one after the other."""

    def __init__(self) -> None:
        self._champions: dict[RegisteredRule, str] = {}
        self._modes: defaultdict[RegisteredRule, dict[bool, int]] = defaultdict(dict)

    def follow(self, event: Event, rule: RegisteredRule) -> None:
        is_trial = event.version != self._champions.get(rule)
        if event.mode and not (is_trial and event.mode == str(OFF)):
            self._modes[rule][is_trial] = event.number
        elif event.mode or event.kind in ("published", "rolled_back"):
            self._modes[rule].pop(True, None)
        if event.kind in ("published", "rolled_back"):
            self._champions[rule] = event.version

    def of(self, rule: RegisteredRule) -> tuple[str | None, dict[bool, int]]:
        """The champion, and the events that set the modes in force."""
        return self._champions.get(rule), self._modes[rule]


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

    def crown(self, rule: RegisteredRule, version: str, champion: str | None) -> None:
        """Make the version champion, and the `champion` of now the previous one."""
        if champion:
            self.name(rule, "previous", champion)
        self.name(rule, "champion", version)
        self.run(f"DELETE FROM mode {OF_RULE} AND is_trial", rule)
        if self.aliases(rule).get("candidate") == version:
            self.unname(rule, "candidate")

    def approving(self, rule: RegisteredRule, version: str) -> set[str]:
        """Who has approved of the version since the champion became one."""
        crowned = f"SELECT max(number) {CROWNED} AND version IN (SELECT id FROM version {OF_RULE})"
        query = f"{APPROVING} AND number > ({crowned})"
        return {actor for (actor,) in self.run(query, (version, *rule))}

    def follows_zero(self, champion: str, rule: RegisteredRule, card: Card) -> bool:
        """Whether the champion is a version 0, and this is another one or the first that is more,
        and new: of what has been registered a person decides.
        """
        query = f"SELECT 1 FROM version {OF_RULE} AND id NOT LIKE '{ZERO}%'"
        has_more = bool(self.run(query, rule).fetchone())
        return champion.startswith(ZERO) and (card.untrained is not None or not has_more)

    def on_trial(self, rule: RegisteredRule) -> tuple[str, int] | None:
        """The version on trial, and the event that set its mode; None if there is none."""
        trial = f"SELECT version, number FROM event JOIN mode ON event = number {OF_RULE}"
        found: tuple[str, int] | None = self.run(f"{trial} AND is_trial", rule).fetchone()
        return found

    def set_mode(self, rule: RegisteredRule, mode: Mode, event: int, *, is_trial: bool) -> None:
        """Let the mode be the one that this event set."""
        self.run(f"DELETE FROM mode {OF_RULE} AND is_trial = ?", (*rule, is_trial))
        if mode != OFF or not is_trial:
            self.run("INSERT INTO mode VALUES (?, ?, ?, ?, ?)", (*rule, is_trial, event))

    def record(
        self,
        actor: str,
        kind: EventKind,
        version: str,
        reason: str,
        mode: Mode | None = None,
        gate: Gate | None = None,
    ) -> int:
        """Add an event to the chain; its number."""
        last = self.run("SELECT number, hash FROM event ORDER BY number DESC LIMIT 1", ())
        number, before = last.fetchone() or (0, "")
        at = datetime.now(UTC).isoformat(timespec="seconds")
        set_mode, limits = str(mode or ""), gate.model_dump_json() if gate else ""
        event = (number + 1, at, actor, kind, version, set_mode, limits, reason)
        row = (*event, _hash(before, *event))
        self.run("INSERT INTO event VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        return number + 1


def _check_reason(reason: str) -> None:
    if not reason.strip():
        remedy = 'Give it, as WHY="fewer false alarms on refunds"'
        raise GuardError("the reason is missing", remedy=remedy)


def user_name() -> str:
    """Who runs this process."""
    with contextlib.suppress(KeyError):  # a container's user may have no name
        return pwd.getpwuid(os.getuid()).pw_name
    return f"user {os.getuid()}"


def publishing(rule: RegisteredRule) -> str:
    """The command that publishes the rule's candidate."""
    return f'make publish RULE={rule.rule} MODEL={rule.model} METHOD={rule.method} WHY="..."'


def _hash(before: str, *event: object) -> str:
    """Of an event, whose hash field is left out, and of the hash of the one before it."""
    return hashlib.sha256(json.dumps([before, *event], ensure_ascii=False).encode()).hexdigest()


def _to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
