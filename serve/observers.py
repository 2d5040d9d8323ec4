"""Who is told of every check, by the command line's options. Knows nothing of what is checked."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from serve.api.observe.audit import AuditLog
from serve.api.observe.record import Observer


def open_observers(audit_log: Path | None, traces: str | None) -> list[Observer]:
    """The observers that were asked for. Raises GuardError if a file cannot be opened."""
    asked_for: list[Observer] = []
    if audit_log is not None:
        asked_for.append(AuditLog(_process_path(audit_log)))
    if traces is not None:
        from serve.api.observe.traces import Traces  # OpenTelemetry, which nothing else needs

        asked_for.append(Traces.to_collector(traces))
    return asked_for


def _process_path(path: Path) -> Path:
    """The path with {hostname} and {pid} filled in: lines of two machines to one file may mix."""
    name = str(path).replace("{hostname}", socket.gethostname())
    return Path(name.replace("{pid}", str(os.getpid())))
