"""The audit log: a line a check, with what decided and by which weights, and without content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from guard.errors import GuardError
from serve.api.observe.audit import AuditLog
from tests.serve.api.observe.toy_record import MARKER, record
from tests.serve.serving import MESSAGES, Serve
from tests.serve.toy_engine import LOGITS, RULE_SETS, ToyEngine


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


LINE = (
    '{"time": "2023-11-14T22:13:20.250+00:00", "request_id": "request-1", "tenant": "shop", '
    '"format": "check", "rule_set": "support", "verdict": "violation", "decided_by": ["flagged"], '
    '"purpose": "answer", "failure": null, "latency_ms": 125.0, "rules": [{"rule": "flagged", '
    '"version": "0123abcd", "p_violation": 0.75, "threshold": 0.5, "verdict": "violation", '
    '"confident": true}, {"rule": "fine", "version": "0123abcd", "p_violation": 0.45, '
    '"threshold": 0.5, "verdict": "allow", "confident": false}], "unjudged": {"broken": "nan"}, '
    '"cached_tokens": 30, "computed_tokens": 12}'
)


def test_a_line_says_which_weights_said_what_when_and_to_whom(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.checked(record())
    log.checked(record(failure="too_late"))
    log.close()
    assert path.read_text().splitlines()[0] == LINE
    failed = lines(path)[1]
    assert (failed["verdict"], failed["failure"]) == ("unjudged", "too_late")
    assert "rules" not in failed and MARKER not in path.read_text()


def test_every_check_over_http_has_its_line_and_no_content(tmp_path: Path, serve: Serve) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"request_id": "of an earlier run"}\n')
    client = serve(ToyEngine(LOGITS), rule_sets=RULE_SETS, observers=[AuditLog(path)])
    staff = {"rule_set": "staff", "metadata": {"audience": MARKER}, "cache_salt": MARKER}
    secret = [{"role": "user", "content": MARKER}]
    first = client.post("/v1/check", json={"messages": secret, **staff})
    client.post("/v1/moderations", json={"input": [MARKER, MARKER]})
    client.post("/v1/check", json={"messages": secret, "rules": [MARKER]})  # no check
    written = lines(path)
    assert [line.get("format") for line in written] == [None, "check", *["moderations"] * 2]
    assert written[1]["request_id"] == first.headers["x-request-id"]
    assert written[1]["verdict"] == first.json()["verdict"] == "violation"
    assert written[2]["request_id"] == written[3]["request_id"]
    assert MARKER not in path.read_text()


def test_a_check_that_leaves_no_trace_is_not_answered(tmp_path: Path, serve: Serve) -> None:
    with pytest.raises(GuardError, match=r"no audit log.*can be written"):
        AuditLog(tmp_path / "no" / "such" / "folder")
    log = AuditLog(tmp_path / "audit.jsonl")
    client = serve(ToyEngine(LOGITS), observers=[log])
    assert client.post("/v1/check", json={"messages": MESSAGES}).status_code == 200
    log.close()
    refused = client.post("/v1/check", json={"messages": MESSAGES})
    assert (refused.status_code, refused.json()["verdict"]) == (500, "unjudged")


def test_a_file_that_is_rotated_is_left_behind_and_without_one_checks_fail(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.checked(record())
    path.rename(tmp_path / "audit.jsonl.1")
    log.checked(record())
    log.checked(record())
    assert len(lines(tmp_path / "audit.jsonl.1")) == 1 and len(lines(path)) == 2
    path.unlink()
    path.mkdir()
    for _ in range(2):
        with pytest.raises(OSError, match="directory"):
            log.checked(record())
    path.rmdir()
    log.checked(record())
    log.close()
    assert len(lines(path)) == 1


def test_a_line_that_was_cut_off_is_an_error_and_spoils_no_other(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    whole = log._file

    class FullDisk:
        """Takes ten bytes of a line."""

        def write(self, content: bytes) -> int:
            return whole.write(content[:10])

        def fileno(self) -> int:
            return whole.fileno()

    log._file = FullDisk()  # type: ignore[assignment]
    with pytest.raises(OSError, match="took 10 of"):
        log.checked(record())
    log._file = whole
    log.checked(record())
    log.close()
    cut_off, good = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert len(cut_off) == 10 and json.loads(good)["tenant"] == "shop"
