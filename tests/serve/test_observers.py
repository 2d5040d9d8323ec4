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
