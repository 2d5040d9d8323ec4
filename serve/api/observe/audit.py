"""The audit log: a line of JSON for every check, with which rules said what, and no content.

Knows nothing of what was checked: not its text, its length, or the reasons for which a rule could
not judge it.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from guard.errors import GuardError
from guard.verdict import Verdict
from guard.weights.card import rule_of
from serve.api.observe.record import CheckRecord, JudgedVersion


class AuditLog:
    """Appends to a file; an Observer. A file that is renamed, as logrotate does, is left behind,
    and the next line begins a new one.

    Raises GuardError if it cannot be opened. A line that cannot be written is an error of its
    check: what leaves no trace is not answered.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = self._opened()
        except OSError as error:
            remedy = "Name a file that can be written"
            raise GuardError(f"no audit log: {error}", where=path, remedy=remedy) from error

    def checked(self, record: CheckRecord) -> None:
        if not self._is_in_place():
            renamed, self._file = self._file, self._opened()
            renamed.close()
        line = json.dumps(_line(record), ensure_ascii=False, allow_nan=False)
        content = f"{line}\n".encode()
        if (written := self._file.write(content)) != len(content):
            self._file.write(b"\n")  # a line that was cut off must not spoil the next
            raise OSError(f"the audit log took {written} of {len(content)} bytes")

    def close(self) -> None:
        self._file.close()

    def _opened(self) -> FileIO:
        # Unbuffered, a line is one write at the end: several servers may share the file.
        return self._path.open("ab", buffering=0)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


def _line(record: CheckRecord) -> dict[str, Any]:
    request = record.request
    line: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.began_s, UTC).isoformat(timespec="milliseconds"),
        "request_id": request.request_id,
        "tenant": request.tenant,
        "format": request.wire_format,
        "rule_set": record.rule_set.name,
        "verdict": record.verdict,
        "decided_by": list(record.decision.decided_by) if record.decision else [],
        "purpose": record.purpose,
        "failure": record.failure,
        "latency_ms": round(record.latency_s * 1000, 1),
    }
    check = record.check
    if check is not None:
        line["rules"] = [_rule_line(record, verdict) for verdict in check.verdicts]
        line["unjudged"] = {rule: refusal.code for rule, refusal in check.refused.items()}
        if record.said:
            line["on_trial"] = [_version_line(record, judged) for judged in record.said]
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
    }


def _version_line(record: CheckRecord, judged: JudgedVersion) -> dict[str, Any]:
    line = {"rule": judged.rule, "verdict": judged.word, "code": judged.code}
    if judged.verdict is not None:
        line = _rule_line(record, judged.verdict)
    return line | {"version": judged.version, "mode": judged.mode, "decides": judged.decides}
