from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.observers import open_observers


def test_observers_are_those_that_were_asked_for(tmp_path: Path) -> None:
    assert open_observers(None, None) == []
    asked_for = open_observers(tmp_path / "audit.jsonl", "http://127.0.0.1:9")
    assert [type(observer).__name__ for observer in asked_for] == ["AuditLog", "Traces"]
    for observer in asked_for:
        observer.close()
    with pytest.raises(GuardError, match="no audit log"):
        open_observers(tmp_path, None)


def test_several_processes_have_a_log_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, pid in (("one", 7), ("two", 7), ("two", 8)):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        (log,) = open_observers(tmp_path / "audit-{hostname}-{pid}.jsonl", None)
        log.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["audit-one-7.jsonl", "audit-two-7.jsonl", "audit-two-8.jsonl"]
