"""The audit log: a receipt for every check and stream, and for every version that judges; with
which rules said what, and no content.

Knows nothing of what was checked: not its text, its length, or the reasons for which a rule could
not judge it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from io import FileIO
from operator import attrgetter
from pathlib import Path
from typing import Any

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.verdict import Verdict
from guard.weights.card import Card, rule_of
from serve.api.observe.receipts import ChainEnd, ReceiptKey, chain_end, sealed
from serve.api.observe.record import CheckRecord, JudgedVersion, StreamRecord

DESCRIBED = (  # of a card: which weights judge, on which base, by whose rows and what calibration
    *("rule", "rule_hash", "model", "method", "base", "base_revision", "files", "data_hash"),
    *("test_sha256", "prompt_hash", "answer_hash", "temperature", "bias", "threshold"),
    "uncertainty_band",
)
OF_A_STREAM = ("verdict", "ending", "failure", "came", "judged", "released")
UNKNOWN = -1  # a size that no file has
NOT_OF_THE_CHAIN = (FileNotFoundError, PermissionError, GuardError)  # a file beside the log
LOCK_TRIES, LOCK_POLL_S = 500, 0.002  # a second together


class AuditLog:
    """Appends to a file; an Observer, and with a key a ContentHasher.

    Several processes may share the file: each holds its lock while it writes. A file that is
    renamed, as logrotate does, is left behind, and the next line begins a new one, which goes on
    with the chain. So does the line behind one that was cut off, with the last whole one.

    Raises GuardError if it cannot be opened, or ends with what are no receipts. A line that cannot
    be written is an error of its check: what leaves no trace is not answered.
    """

    def __init__(self, path: Path, key: ReceiptKey | None = None) -> None:
        self._path = path
        self._key = key
        self._end = ChainEnd()
        self._size = UNKNOWN  # of the file as this process left it
        self._described: set[str] = set()  # the versions that it described in this file
        try:
            self._file = self._opened()
            chain_end(self._file)
        except OSError as error:
            remedy = "Name a file that can be written"
            raise GuardError(f"no audit log: {error}", where=path, remedy=remedy) from error

    def content_hash(self, messages: Sequence[Message]) -> str:
        return self._key.content_hash(messages) if self._key else ""

    def checked(self, record: CheckRecord) -> None:
        self._append(_line(record), record.judging())

    def streamed(self, record: StreamRecord) -> None:
        self._append(_stream_line(record))

    def close(self) -> None:
        self._file.close()

    def _append(self, line: dict[str, Any], judging: Sequence[Card] = ()) -> None:
        with self._locked():
            size = os.fstat(self._file.fileno()).st_size
            content, end = self._followed(size)
            new = {card.version: card for card in judging if card.version not in self._described}
            for card in new.values():
                receipt, end = sealed(_card_line(card, line["time"]), end, self._key)
                content += receipt
            receipt, end = sealed(line, end, self._key)
            content += receipt
            self._size = UNKNOWN
            if (written := self._file.write(content)) != len(content):
                raise OSError(f"the audit log took {written} of {len(content)} bytes")
            self._size, self._end = size + written, end
            self._described |= new.keys()

    def _followed(self, size: int) -> tuple[bytes, ChainEnd]:
        """What ends a line that was cut off, and the receipt that the next one follows."""
        if size == self._size:
            return b"", self._end
        if not size:
            self._described.clear()
            return b"", self._renamed_end()
        is_cut = os.pread(self._file.fileno(), 1, size - 1) != b"\n"
        return b"\n" * is_cut, self._last(chain_end(self._file) or self._renamed_end())

    def _renamed_end(self) -> ChainEnd:
        """The last receipt of the files that had this name before."""
        end = self._end
        for path in self._path.parent.glob(f"{glob.escape(self._path.name)}?*"):
            if self._is_at(path) or not path.is_file():  # say a link, or a pipe
                continue
            with contextlib.suppress(*NOT_OF_THE_CHAIN), path.open("rb", buffering=0) as file:
                _lock(file)  # another process may be at its last line
                end = max(end, chain_end(file) or end)
        return self._last(end)

    def _last(self, end: ChainEnd) -> ChainEnd:
        """This end, or what this process wrote where that was taken out of the file."""
        return max(self._end, end, key=attrgetter("number"))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file that has the name now. No other one is held meanwhile: whoever waits for
        this one may hold that.
        """
        _lock(self._file)
        try:
            while not self._is_at(self._path):
                self._end = self._last(chain_end(self._file) or self._end)
                renamed, self._file = self._file, self._opened()
                renamed.close()
                self._size = UNKNOWN
                self._described.clear()
                _lock(self._file)
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _opened(self) -> FileIO:
        # Unbuffered, what is appended is one write at the end.
        return self._path.open("a+b", buffering=0)

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


def _lock(file: FileIO) -> None:
    """Raises OSError where somebody else holds it for long: no check is answered meanwhile."""
    for _ in range(LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(LOCK_POLL_S)
    raise OSError("another process holds the audit log")


def _card_line(card: Card, at: str) -> dict[str, Any]:
    described = card.model_dump(mode="json", include=set(DESCRIBED))
    return {"kind": "version", "time": at, "version": card.version, **described}


def _stated(kind: str, record: CheckRecord | StreamRecord, fields: Sequence[str]) -> dict[str, Any]:
    """What lines of both kinds say, and these fields of the record."""
    began = datetime.fromtimestamp(record.began_s, UTC)
    line = {
        "kind": kind,
        "time": began.isoformat(timespec="milliseconds"),
        "request_id": record.request.request_id,
        "tenant": record.request.tenant,
        "format": record.request.wire_format,
        "rule_set": record.rule_set.name,
    }
    return line | {name: getattr(record, name) for name in fields}


def _stream_line(record: StreamRecord) -> dict[str, Any]:
    line = _stated("stream", record, OF_A_STREAM)
    return line | {"held": record.came - record.released}


def _line(record: CheckRecord) -> dict[str, Any]:
    line = _stated("check", record, ("verdict",))
    line["decided_by"] = list(record.decision.decided_by) if record.decision else []
    line |= {"purpose": record.purpose, "failure": record.failure}
    line["latency_ms"] = round(record.latency_s * 1000, 1)
    if record.content_hash:
        line["content"] = record.content_hash
    check = record.check
    if check is not None:
        said = {verdict.rule: _rule_line(record, verdict) for verdict in check.verdicts}
        line["rules"] = [said[name] for name in said if name not in record.policies]
        line["unjudged"] = {rule: refusal.code for rule, refusal in check.refused.items()}
        if record.said:
            line["on_trial"] = [_version_line(record, judged) for judged in record.said]
        stated: list[dict[str, Any]] = []
        for name, text_hash in record.policies.items():
            stated.append({"rule": name, "text": text_hash, **said.get(name, {})})
        if stated:
            line["policies"] = stated
        line["cached_tokens"] = check.cached_tokens
        line["computed_tokens"] = check.computed_tokens
    return line


def _rule_line(record: CheckRecord, verdict: Verdict) -> dict[str, Any]:
    return {
        "rule": rule_of(verdict.rule),
        "version": record.version_of(verdict.rule),
        "p_violation": round(verdict.p_violation, 6),
        "threshold": verdict.threshold,
        "verdict": verdict.word,
        "confident": verdict.confident,
        "by": verdict.by,
    }


def _version_line(record: CheckRecord, judged: JudgedVersion) -> dict[str, Any]:
    line = {"rule": judged.rule, "verdict": judged.word, "code": judged.code}
    if judged.verdict is not None:
        line = _rule_line(record, judged.verdict)
    return line | {"version": judged.version, "mode": judged.mode, "decides": judged.decides}
