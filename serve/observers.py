"""Who is told of every check, by the command line's options. Knows nothing of what is checked."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from guard.errors import GuardError
from serve.api.observe.audit import AuditLog
from serve.api.observe.receipts import ReceiptKey
from serve.api.observe.record import Observer


def open_observers(
    audit_log: Path | None, traces: str | None, audit_key: Path | None = None
) -> list[Observer]:
    """The observers that were asked for. Raises GuardError if a file cannot be used."""
    asked_for: list[Observer] = []
    key = ReceiptKey.read(audit_key) if audit_key else None
    if audit_log is not None:
        # Lines of two machines or processes to one file may mix.
        path = str(audit_log).replace("{hostname}", socket.gethostname())
        asked_for.append(AuditLog(Path(path.replace("{pid}", str(os.getpid()))), key))
    elif key is not None:
        problem, remedy = "a key signs an audit log, and there is none", "Name one: AUDIT="
        raise GuardError(problem, got=audit_key, remedy=remedy)
    if traces is not None:
        from serve.api.observe.traces import Traces  # OpenTelemetry, which nothing else needs

        asked_for.append(Traces.to_collector(traces))
    return asked_for
