from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.verdict import Verdict
from serve.api.observe.audit import AuditLog
from serve.api.observe.record import CheckRecord, RequestFacts
from serve.engine import Check
from serve.plan.trace import read_trace
from serve.policy.rule_set import RuleSet

SUFFIX = 3
RULES = ("pii", "toxicity")


def written(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_lines_are_read_in_order_of_time_with_rules_by_popularity(tmp_path: Path) -> None:
    path = written(
        tmp_path / "trace.jsonl",
        {"time": 112.0, "session": "b", "tokens": 80, "rules": ["toxicity"]},
        {"time": 100.5, "session": "a", "tokens": 50, "rules": ["pii", "toxicity"]},
        "",
        {"time": 110.0, "session": "a", "tokens": 90, "rules": ["toxicity"], "cached_tokens": 32},
    )
    trace = read_trace(path, SUFFIX)
    assert trace.rules == ("toxicity", "pii") and trace.left_out == 0
    assert [arrival.due_s for arrival in trace.arrivals] == [0.0, 9.5, 11.5]
    assert [arrival.session for arrival in trace.arrivals] == [0, 0, 1]
    assert [arrival.rules for arrival in trace.arrivals] == [(1, 0), (0,), (0,)]
    assert [arrival.cached_tokens for arrival in trace.arrivals] == [None, 32, None]


def test_a_number_stands_for_the_most_popular_rules(tmp_path: Path) -> None:
    lines = [{"time": number, "tokens": 50, "rules": 3 - number} for number in range(2)]
    trace = read_trace(written(tmp_path / "trace.jsonl", *lines), SUFFIX)
    assert [arrival.rules for arrival in trace.arrivals] == [(0, 1, 2), (0, 1)]
    assert trace.arrivals[0].session != trace.arrivals[1].session


def test_an_audit_log_of_the_server_is_a_trace(tmp_path: Path) -> None:
    """Lines as the server writes them: of a conversation of 100 tokens, 64 of them in the cache."""
    log = AuditLog(tmp_path / "audit.jsonl")
    for began_s, failure in ((1000.0, None), (1001.5, None), (1002.0, "too_late")):
        log.checked(_record(began_s, failure))
    log.close()
    trace = read_trace(tmp_path / "audit.jsonl", SUFFIX)
    assert trace.left_out == 1 and len(trace.arrivals) == 2
    first, second = trace.arrivals
    assert (first.tokens, first.cached_tokens) == (100, 64)
    assert second.due_s == pytest.approx(1.5) and len(second.rules) == 2


def _record(began_s: float, failure: str | None) -> CheckRecord:
    check = None
    if failure is None:
        verdicts = tuple(Verdict(rule, -2.0, 0.1, 0.5) for rule in RULES)
        prompts, computed = 2 * (100 + SUFFIX), 100 - 64 + 2 * SUFFIX
        check = Check(verdicts, {}, prompts - computed, computed, 10.0)
    facts, rule_set = RequestFacts("id", "check"), RuleSet.any_of(RULES)
    return CheckRecord(facts, rule_set, {}, began_s, 0.01, check, None, failure)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], r":1: not a line of JSON"),
        (["[1]"], r":1: .*object"),
        ([{"time": 1, "tokens": 5, "rules": 1}, {"time": 1}], r":2: missing key 'tokens'"),
        ([{"request_id": "a", "rules": [{"rule": "pii"}]}], r":1: .*audit log: 'computed_tokens'"),
        ([{"request_id": "a", "rules": ["pii"]}], r":1: not a line of an audit log"),
        ([{"time": 1, "tokens": 0, "rules": 1}], "'tokens'.*greater than or equal to 1"),
        ([{"time": 1, "tokens": 9, "rules": ["a", "a"]}], "each only once"),
        ([{"time": 1, "tokens": 9, "rules": 0}], "at least one"),
        ([{"time": 1, "tokens": 9, "rules": 1}], "at least two checks.*got 1 checks"),
        ([{"time": 1, "tokens": 9, "rules": 1}] * 2, "every check has the same timestamp"),
        ([{"time": "noon", "tokens": 9, "rules": 1}], "'time'.*got 'noon'"),
        ([{"time": 1, "tokens": 9, "rules": "toxic"}], r":1: 'rules.*toxic"),
        ([{"time": 1, "tokens": 9, "rules": {"pii": 1}}], "'rules"),
        ([{"time": 1, "tokens": 9, "rules": True}], "'rules"),
        ([{"time": math.nan, "tokens": 9, "rules": 1}], r":1: 'time'.*finite number"),
        ([{"time": math.inf, "tokens": 9, "rules": 1}], "'time'.*finite number"),
        ([{"time": 1, "tokens": math.inf, "rules": 1}], r":1: 'tokens'"),
        ([{"time": 1, "tokens": 9, "rules": 1, "cached_tokens": -1}], r":1: 'cached_tokens'"),
        ([{"time": 1, "tokens": 9, "rules": 1, "cached_tokens": 10}], "from 0 to tokens"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(
    tmp_path: Path, lines: list[object], words: str
) -> None:
    with pytest.raises(GuardError, match=words):
        read_trace(written(tmp_path / "trace.jsonl", *lines), SUFFIX)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="no such trace"):
        read_trace(tmp_path / "none.jsonl", SUFFIX)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_bytes("{}".encode("utf-16"))
    with pytest.raises(GuardError, match=r"trace.jsonl: UTF-16 or UTF-32 text"):
        read_trace(tmp_path / "trace.jsonl", SUFFIX)
