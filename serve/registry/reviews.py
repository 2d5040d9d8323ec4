"""Checks that are kept for people to look at, and how these label them.

A check is kept whole: its conversation, encrypted, and a verdict a rule. Reviewers vote on a rule
of it. A label is settled once as many reviewers agree as the policy wants and none disagrees. What
is older than the policy allows is deleted with all that was said of it. Knows nothing of HTTP, nor
of who may see what is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Literal, NamedTuple

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from pydantic import Field

from guard.conversation.example import Message, as_messages
from guard.errors import GuardError
from guard.files.yaml_file import Strict, load
from guard.layout import Runs
from serve.registry.database import Database

KEY = "CENTURION_REVIEW_KEY"
MAKE_KEY = "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"
SET_KEY = f"Set {KEY} to what this prints: .venv/bin/python -c '{MAKE_KEY}'. What is kept already "
SET_KEY += "needs the key that it was kept with"
SCHEMA, SCHEMA_VERSION = Path(__file__).with_name("reviews.sql"), 1
RESTORE = "Restore the file from a copy, or move it away: what is kept in it is lost"
DAY_S = 24 * 3600.0
KEY_DIGITS = 13  # of a hash, hexadecimal: all that a float holds
MOST_BROUGHT = 1_000  # checks of a tenant that nobody else has labelled
# Why a check is queued, the most pressing first. A single one's word for it is the least.
REASONS = "reported uncertain flagged sampled brought"
Label = Literal["violation", "allow"]


class ReviewPolicy(Strict):
    """Which share of the answered checks is kept, for how long, and how many must agree."""

    share: float = Field(default=0.01, ge=0, le=1)
    uncertain: float = Field(default=0.2, ge=0, le=1)
    flagged: float = Field(default=0.0, ge=0, le=1)
    retention_days: int = Field(default=30, ge=1, le=36_500)
    reviews: int = Field(default=2, ge=1)

    def keeps(self, conversation: str, *, is_uncertain: bool, is_flagged: bool) -> bool:
        """Whether to keep a check: the same for all of a conversation's checks that are alike."""
        digest = hashlib.sha256(f"review {conversation}".encode()).hexdigest()
        share = max(self.share, is_uncertain * self.uncertain, is_flagged * self.flagged)
        return int(digest[:KEY_DIGITS], 16) < share * 16.0**KEY_DIGITS


class KeptVerdict(NamedTuple):
    """What a version of a rule said."""

    rule: str
    version: str
    verdict: Label
    p_violation: float
    threshold: float
    confident: bool


@dataclass(frozen=True)
class KeptCheck:
    """A check as it is kept. `tenant` is empty where there is none; `conversation` is its key."""

    request_id: str
    tenant: str
    conversation: str
    messages: Sequence[Message]
    verdicts: Sequence[KeptVerdict] = ()


@dataclass(frozen=True)
class Reviewed:
    """What somebody votes on. Of a None every value is meant. `conversation` is as it is kept."""

    request_id: str
    rule: str
    reviewer: str
    tenant: str | None = None
    conversation: str | None = None


@dataclass(frozen=True)
class Tally:
    """How many reviewers voted for either label, how many must agree, and whether they do."""

    violation: int
    allow: int
    needed: int
    settled: bool


@dataclass(frozen=True)
class QueuedReview:
    """One rule of a kept check. `messages` is None where another key encrypted them; `verdict` and
    its kin are where only a reviewer named the rule.
    """

    messages: tuple[Message, ...] | None
    notes: Sequence[str]
    confident: bool | None
    request_id: str
    tenant: str
    conversation: str
    kept_at: float
    rule: str
    version: str | None
    verdict: Label | None
    p_violation: float | None
    threshold: float | None
    votes: int
    reason: Literal["reported", "uncertain", "flagged", "sampled", "brought"]


class ReviewProgress(NamedTuple):
    """How many checks of a rule wait for votes, are settled as either label, and are disputed."""

    rule: str
    waiting: int
    violations: int
    allows: int
    disputed: int


class SettledLabel(NamedTuple):
    """A label that reviewers settled. `messages` is None where another key encrypted them."""

    id: int
    conversation: str
    messages: tuple[Message, ...] | None
    label: Label


class NotKept(GuardError):
    """Nothing is kept that a vote could be about."""


class VoteRefused(GuardError):
    """The reviewer has voted for the other label, several checks have the request's id, or a tenant
    has brought too many.
    """


class ReviewStore:
    """The review store of an output folder. Its key stays in the environment."""

    def __init__(self, runs: Runs, policy: ReviewPolicy | None = None) -> None:
        self.file = runs.root / "registry" / "reviews.db"
        self.policy = policy or ReviewPolicy()
        self._database = Database(self.file, SCHEMA, SCHEMA_VERSION, "review store", RESTORE)

    def open(self) -> None:
        """Make the file where there is none, note the policy, and delete what has expired. Raises
        GuardError for a missing key, and a file that cannot be used.
        """
        cipher()
        with self._database.errors():
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.touch(mode=0o600)
        with self._database.changing() as changes:
            noted = (self.policy.retention_days, self.policy.reviews)
            changes.execute("INSERT OR REPLACE INTO policy VALUES (1, ?, ?)", noted)
        self.expire()

    def expire(self) -> None:
        """Delete what is older than the policy allows."""
        with self._database.changing() as changes:
            _expire(changes)

    def keep(self, check: KeptCheck) -> None:
        """Keep a check in place of an earlier one of its request and conversation, unless somebody
        has voted on that.
        """
        conversation = _hidden(check.conversation)
        reviewed = Reviewed(check.request_id, "", "", check.tenant, conversation)
        with self._database.changing() as changes:
            _expire(changes)
            before = _find(changes, reviewed)
            unvoted = "DELETE FROM kept WHERE id = ? AND id NOT IN (SELECT kept FROM vote)"
            if before is None or changes.execute(unvoted, (before,)).rowcount:
                _insert(changes, check)

    def vote(
        self, reviewed: Reviewed, label: Label, note: str = "", brought: KeptCheck | None = None
    ) -> Tally:
        """Count a label; the same one again changes nothing. What is not kept is kept as it was
        `brought`; without that raises NotKept. Raises VoteRefused.
        """
        with self._database.changing() as changes:
            _expire(changes)
            kept = _find(changes, reviewed)
            if kept is None and brought is not None:
                _check_room(changes, brought.tenant)
                kept = _insert(changes, brought)
            if kept is None:
                remedy = "Send its `messages` with the label"
                problem = "no check of this request is kept: it was not sampled, or has expired"
                raise NotKept(problem, got=reviewed.request_id, remedy=remedy)
            verdict = "INSERT OR IGNORE INTO verdict (kept, rule) VALUES (?, ?)"
            changes.execute(verdict, (kept, reviewed.rule))
            vote = (kept, reviewed.rule, reviewed.reviewer)
            row = (*vote, label, _encrypted(note) if note else "")
            changes.execute("INSERT OR IGNORE INTO vote VALUES (?, ?, ?, ?, ?)", row)
            voted = "SELECT label FROM vote WHERE (kept, rule, reviewer) = (?, ?, ?)"
            (before,) = changes.execute(voted, vote).fetchone()
            if before != label:
                remedy = "DELETE /v1/feedback takes that back"
                raise VoteRefused("this reviewer has voted", got=before, remedy=remedy)
            return _tally(changes, kept, reviewed.rule)

    def withdraw(self, reviewed: Reviewed) -> Tally:
        """Take a label back. Raises NotKept if there is none, and VoteRefused."""
        with self._database.changing() as changes:
            _expire(changes)
            kept = _find(changes, reviewed)
            vote = (kept, reviewed.rule, reviewed.reviewer)
            delete = "DELETE FROM vote WHERE (kept, rule, reviewer) = (?, ?, ?)"
            if kept is None or not changes.execute(delete, vote).rowcount:
                raise NotKept("this reviewer has not voted on that", got=reviewed.request_id)
            return _tally(changes, kept, reviewed.rule)

    def forget(self, conversation: str) -> int:
        """Delete all that is kept of a conversation; how many checks that were."""
        with self._database.changing() as changes:
            _expire(changes)
            delete = "DELETE FROM kept WHERE conversation = ?"
            return changes.execute(delete, (conversation,)).rowcount

    def queue(
        self, reviewer: str, rule: str | None = None, limit: int = 20, skip: int = 0
    ) -> list[QueuedReview]:
        """What has too few votes and none of the reviewer's, the most pressing first."""
        self.expire()
        theirs = "(kept, rule) IN (SELECT kept, rule FROM vote WHERE reviewer = ?)"
        where = f"WHERE NOT {theirs} AND rule = coalesce(?, rule)"
        order = (
            f"ORDER BY instr('{REASONS}', reason), kept_at DESC, kept DESC, rule LIMIT ? OFFSET ?"
        )
        query = f"SELECT * FROM queue {where} {order}"
        rows = self._database.rows(query, (reviewer, rule, limit, skip))
        return [_queued(*row) for row in rows]

    def progress(self) -> list[ReviewProgress]:
        rows = self._database.rows("SELECT * FROM progress ORDER BY rule")
        return [ReviewProgress(*row) for row in rows]

    def settled(self, rule: str) -> list[SettledLabel]:
        """The labels of a rule on which reviewers agree, the first one first."""
        self.expire()
        columns = "id, conversation, content, iif(violation, 'violation', 'allow')"
        settled = "FROM tally JOIN kept ON id = kept WHERE rule = ? AND settled"
        rows = self._database.rows(f"SELECT {columns} {settled} ORDER BY id", (rule,))
        labels: list[SettledLabel] = []
        for check, conversation, content, label in rows:
            labels.append(SettledLabel(check, conversation, _messages(content), label))
        return labels


def _expire(changes: Connection) -> None:
    allowed_s = f"{DAY_S} * (SELECT retention_days FROM policy)"
    now = time.time()
    # Kept while the clock was ahead, it would stay for as long as that was.
    changes.execute("UPDATE kept SET kept_at = ? WHERE kept_at > ?", (now, now))
    changes.execute(f"DELETE FROM kept WHERE kept_at < ? - {allowed_s}", (now,))


def _find(changes: Connection, reviewed: Reviewed) -> int | None:
    """The check that is reviewed; None if it is not kept. Raises VoteRefused for several."""
    where = "request_id = ? AND tenant = coalesce(?, tenant)"
    query = f"SELECT id FROM kept WHERE {where} AND conversation = coalesce(?, conversation)"
    named = (reviewed.request_id, reviewed.tenant, reviewed.conversation)
    found: list[tuple[int]] = changes.execute(query, named).fetchall()
    if len(found) > 1:
        problem = f"{len(found)} checks have this request id"
        remedy = "Name the `conversation`, as the queue has it"
        raise VoteRefused(problem, got=reviewed.request_id, remedy=remedy)
    return found[0][0] if found else None


def _check_room(changes: Connection, tenant: str) -> None:
    """Raise VoteRefused where too many wait that a tenant brought: they take disk and attention."""
    query = "SELECT count(*) FROM brought WHERE tenant = ?"
    (brought,) = changes.execute(query, (tenant,)).fetchone()
    if tenant and brought >= MOST_BROUGHT:
        problem = "too many checks that this tenant brought wait for others' labels"
        raise VoteRefused(problem, got=brought, remedy="Have an admin label or delete some")


def _insert(changes: Connection, check: KeptCheck) -> int:
    turns = [dataclasses.asdict(message) for message in check.messages]
    content = _encrypted(json.dumps(turns))
    names = (check.request_id, check.tenant, _hidden(check.conversation))
    row = (*names, content, time.time())
    kept = changes.execute("INSERT INTO kept VALUES (NULL, ?, ?, ?, ?, ?)", row).lastrowid
    assert kept is not None
    for verdict in check.verdicts:
        changes.execute("INSERT INTO verdict VALUES (?, ?, ?, ?, ?, ?, ?)", (kept, *verdict))
    return kept


def _queued(_: int, content: str, notes: str, confident: int | None, *row: Any) -> QueuedReview:
    readable = [note for note in map(_decrypted, json.loads(notes)) if note is not None]
    is_confident = None if confident is None else bool(confident)
    return QueuedReview(_messages(content), readable, is_confident, *row)


def _tally(changes: Connection, kept: int, rule: str) -> Tally:
    query = "SELECT violation, allow, needed, settled FROM tally WHERE (kept, rule) = (?, ?)"
    violation, allow, needed, settled = changes.execute(query, (kept, rule)).fetchone()
    return Tally(violation, allow, needed, bool(settled))


def _keys() -> list[str]:
    keys = os.environ.get(KEY, "")
    if not keys:
        raise GuardError(f"{KEY} is not set: what is kept is encrypted", remedy=SET_KEY)
    return [key.strip() for key in keys.split(",")]


def _hidden(conversation: str) -> str:
    """A conversation's key as it is kept: of the plain one, a hash, short texts can be guessed."""
    key, text = _keys()[0].encode(), f"conversation {conversation}".encode()
    return hmac.digest(key, text, "sha256").hex()


def cipher() -> MultiFernet:
    """What encrypts by the first of the environment's keys, and decrypts by each. Raises
    GuardError if there is none, or one that is malformed.
    """
    try:
        return MultiFernet(map(Fernet, _keys()))
    except ValueError as error:
        raise GuardError(f"{KEY} is no key", remedy=SET_KEY) from error


def _encrypted(text: str) -> str:
    return cipher().encrypt(text.encode()).decode()


def _decrypted(token: str) -> str | None:
    """The text; None where another key encrypted it."""
    try:
        return cipher().decrypt(token).decode()
    except InvalidToken:
        return None


def _messages(content: str) -> tuple[Message, ...] | None:
    text = _decrypted(content)
    return None if text is None else as_messages(json.loads(text), where="what is kept")


def open_reviews(policy: Path | None, runs: Runs) -> ReviewStore | None:
    """The store with the policy of a file; None without one. Raises GuardError for a bad policy,
    and as `ReviewStore.open`.
    """
    if policy is None:
        return None
    store = ReviewStore(runs, load(policy, ReviewPolicy))
    store.open()
    return store
