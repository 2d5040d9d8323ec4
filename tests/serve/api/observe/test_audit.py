"""What operators look at: audit log, traces, the server's log and metrics say what decided, by
which weights and where it failed, and never on which text. Grafana's board asks for what exists.
"""

from __future__ import annotations

import fcntl
import json
import logging
import logging.config
import os
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from httpx import Client
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client.parser import text_string_to_metric_families

from guard.errors import GuardError
from serve.api.observe.audit import AuditLog
from serve.api.observe.record import RequestFacts
from serve.api.observe.server_log import configuration
from serve.api.observe.traces import NS, SPAN, Traces
from serve.engine.score import EngineCounters
from tests.serve.api.observe.toy_record import MARKER, record
from tests.serve.serving import MESSAGES, Serve, serving
from tests.serve.toy_engine import LOGITS, RULE_SETS, ToyEngine


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


LINE = (
    '{"kind": "check", "time": "2023-11-14T22:13:20.250+00:00", "request_id": "request-1", '
    '"tenant": "shop", "format": "check", "rule_set": "support", "verdict": "violation", '
    '"decided_by": ["flagged"], "purpose": "answer", "failure": null, "latency_ms": 125.0, '
    '"rules": [{"rule": "flagged", "version": "0123abcd", "p_violation": 0.75, "threshold": 0.5, '
    '"verdict": "violation", '
    '"confident": true, "by": "reader"}, {"rule": "fine", "version": "0123abcd", "p_violation": '
    '0.45, "threshold": 0.5, "verdict": "allow", "confident": false, "by": ""}], '
    '"unjudged": {"broken": "nan"}, '
    '"cached_tokens": 30, "computed_tokens": 12}'
)


def test_a_line_says_which_weights_said_what_when_and_to_whom(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.checked(record())
    log.checked(record(failure="too_late"))
    log.close()
    version, line, _ = path.read_text().splitlines()
    assert line.startswith(LINE[:-1]) and json.loads(version)["kind"] == "version"
    failed = lines(path)[2]
    assert (failed["verdict"], failed["failure"]) == ("unjudged", "too_late")
    assert "rules" not in failed and MARKER not in path.read_text()


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
    assert len(lines(tmp_path / "audit.jsonl.1")) == 2 and len(lines(path)) == 3
    assert [line["kind"] for line in lines(path)] == ["version", "check", "check"]  # told anew
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        log.checked(record())
    path.rmdir()
    log.checked(record())
    log.close()
    assert len(lines(path)) == 2


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
    cut_off, version, good = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert len(cut_off) == 10 and json.loads(version)["number"] == 1
    assert json.loads(good)["tenant"] == "shop"


def test_a_file_that_is_locked_holds_no_check_up_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.api.observe.audit.LOCK_TRIES", 9)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    with path.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        with pytest.raises(OSError, match="holds the audit log"):
            log.checked(record())
    log.checked(record())
    assert len(lines(path)) == 2


def test_what_is_no_log_beside_the_log_is_let_be_and_a_long_one_without_receipts_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "audit.jsonl"
    path.with_name("audit.jsonl.latest").symlink_to(path)
    os.mkfifo(path.with_name("audit.jsonl.pipe"))
    earlier = path.with_name("audit.jsonl.earlier")
    earlier.write_text('{"request_id": "of an earlier run"}\n' * 2**17)
    AuditLog(path).checked(record())
    assert lines(path)[0]["number"] == 1
    with pytest.raises(GuardError, match="last lines are no receipts"):
        AuditLog(earlier)


def test_a_span_has_the_check_s_time_verdict_and_rules_and_its_caller_for_a_parent() -> None:
    exporter = InMemorySpanExporter()
    traces = Traces(exporter)
    traces.checked(record())
    traces.checked(record(failure="too_late"))
    traces.checked(record(request=RequestFacts("1", "check", None, "no trace at all")))
    traces.close()
    answered, failed, alone = exporter.get_finished_spans()
    assert alone.parent is None
    assert answered.name == SPAN and answered.parent is not None
    assert answered.parent.trace_id == int("a" * 32, 16)
    assert answered.parent.span_id == int("b" * 16, 16)
    assert (answered.end_time or 0) - (answered.start_time or 0) == NS // 8
    attributes = dict(answered.attributes or {})
    assert (attributes["guard.verdict"], attributes["guard.tenant"]) == ("violation", "shop")
    assert attributes["guard.decided_by"] == ("flagged",)
    rules = [dict(event.attributes or {}) for event in answered.events]
    verdicts = [(rule["guard.rule"], rule["guard.verdict"]) for rule in rules]
    assert verdicts == [("flagged", "violation"), ("fine", "allow"), ("broken", "unjudged")]
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "too_late")


def test_every_check_over_http_has_its_line_and_its_span_and_no_content(
    monkeypatch: pytest.MonkeyPatch, serve: Serve, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    received: list[bytes] = []
    receiver = FastAPI()

    @receiver.post("/v1/traces")
    async def receive(request: Request) -> None:
        received.append(await request.body())

    path = tmp_path / "audit.jsonl"
    path.write_text('{"request_id": "of an earlier run"}\n')
    secret = [{"role": "user", "content": MARKER}]
    staff = {"rule_set": "staff", "metadata": {"audience": MARKER}, "cache_salt": MARKER}
    headers = {"traceparent": f"00-{'c' * 32}-{'d' * 16}-01"}
    with serving(receiver) as collector:
        traces = Traces.to_collector(str(collector.base_url))
        observers = [AuditLog(path), traces]
        client = serve(ToyEngine(LOGITS), rule_sets=RULE_SETS, observers=observers)
        first = client.post("/v1/check", json={"messages": secret, **staff}, headers=headers)
        client.post("/v1/moderations", json={"input": [MARKER, MARKER]})
        client.post("/v1/check", json={"messages": secret, "rules": [MARKER]})  # no check
        traces.close()
    written, *moderated = [line for line in lines(path) if line.get("kind") == "check"]
    assert [line["format"] for line in (written, *moderated)] == ["check", *["moderations"] * 2]
    assert written["request_id"] == first.headers["x-request-id"]
    assert written["verdict"] == first.json()["verdict"] == "violation"
    assert moderated[0]["request_id"] == moderated[1]["request_id"]
    (content,) = received
    (scope,) = ExportTraceServiceRequest.FromString(content).resource_spans[0].scope_spans
    span = scope.spans[0]
    ids = (span.trace_id.hex(), span.parent_span_id.hex())
    assert (len(scope.spans), span.name, *ids) == (3, SPAN, "c" * 32, "d" * 16)
    assert MARKER not in path.read_text() and MARKER.encode() not in content


def test_errors_go_to_stderr_with_their_places_and_without_words_about_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logging.config.dictConfig(configuration())
        log = logging.getLogger("serve.test")
        log.info("nothing of interest")
        try:
            int(MARKER)  # whose error quotes it
        except ValueError as quoting:
            failure = GuardError("the disk is full")
            failure.__cause__ = quoting
            log.error("a check failed", exc_info=failure)
    finally:
        root.handlers[:], root.level = handlers, level
    text = capsys.readouterr().err
    assert "ERROR serve.test: a check failed" in text and "nothing of interest" not in text
    assert __file__ in text and MARKER not in text
    assert text.index("ValueError") < text.index("GuardError: the disk is full")


BOARD = Path(__file__).parents[4] / "setup" / "grafana" / "centurion.json"


def scraped(client: Client) -> dict[tuple[str, ...], float]:
    """(name, values of its labels in the order of their names) -> value."""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = (sample.labels[name] for name in sorted(sample.labels))
            found[sample.name, *labels] = sample.value
    return found


def test_checks_verdicts_and_tokens_are_counted(serve: Serve) -> None:
    client = serve(ToyEngine(LOGITS), rule_sets=RULE_SETS)
    before = scraped(client)
    assert before["guard_verdicts_total", "fine", "allow"] == 0  # they exist before they count
    client.post("/v1/check", json={"messages": MESSAGES})
    client.post("/v1/check", json={"messages": MESSAGES, "rule_set": "both"})
    unjudged = [{"role": "user", "content": "cannot be judged"}]
    client.post("/v1/check", json={"messages": unjudged, "rules": ["fine"]})
    after = scraped(client)
    counted = {
        ("guard_verdicts_total", "flagged", "violation"): 2,
        ("guard_verdicts_total", "fine", "allow"): 2,
        ("guard_verdicts_total", "fine", "unjudged"): 1,
        ("guard_uncertain_verdicts_total", "flagged"): 2,  # 0.27, in [0.2, 0.3]
        ("guard_checks_total", "", "", "violation"): 1,
        ("guard_checks_total", "both", "", "allow"): 1,
        ("guard_checks_total", "", "", "unjudged"): 1,
        ("guard_tokens_total", "cached"): 4 * 3,
        ("guard_tokens_total", "computed"): 4 * 2,
        ("guard_check_seconds_count", "both"): 1,
        ("guard_request_seconds_count", "check", "200"): 3,
    }
    assert {key: after[key] for key in counted} == counted
    assert 0 < after["guard_check_seconds_sum", "both"] < 60


def test_what_has_no_answer_is_counted_by_its_reason(serve: Serve) -> None:
    client = serve(ToyEngine())
    client.post("/v1/check", json={"messages": MESSAGES, "rules": ["crash"]})
    body = {"messages": MESSAGES, "rules": ["nobody"]}
    client.post("/v1/check", json=body, headers={"x-request-id": "nobody"})
    client.post("/nowhere", json={})
    after = scraped(client)
    assert after["guard_check_failures_total", "engine_failed"] == 1
    assert after["guard_check_failures_total", "overloaded"] == 0
    for answered in (("check", "503"), ("check", "422"), ("none", "404")):
        assert after["guard_request_seconds_count", *answered] == 1
    assert after["guard_verdicts_total", "crash", "unjudged"] == 0
    openmetrics = {"accept": "application/openmetrics-text; version=1.0.0"}
    response = client.get("/metrics", headers=openmetrics)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")
    assert "nobody" not in response.text and "nowhere" not in response.text  # callers' words


def test_what_the_engine_says_of_itself_is_new(serve: Serve) -> None:
    engine = ToyEngine(LOGITS)
    client = serve(engine)
    figures = {"adapters": 2, "adapter_loads": 5, "swap_ins": 7, "scheduled_tokens": 900}
    engine.counters = EngineCounters(**figures, forward_passes=12, cache_tokens=4096, step_s=1.5)
    client.post("/v1/check", json={"messages": MESSAGES})
    after = scraped(client)
    while after[("guard_adapters",)] != 2 or after[("guard_checks_open",)]:
        after = scraped(client)  # the thread reads them after the answer
    said: dict[str, float] = {"guard_adapter_loads_total": 5, "guard_adapter_swap_ins_total": 7}
    said |= {"guard_engine_tokens_total": 900, "guard_engine_forward_passes_total": 12}
    said |= {"guard_engine_step_seconds_total": 1.5, "guard_cache_capacity_tokens": 4096}
    said |= {"guard_ready": 1, "guard_checks_waiting": 0}
    assert {name: after[(name,)] for name in said} == said
    assert after["guard_rule_info", "alora", "fine", "0123456789abcdef"] == 1
    engine.is_usable = False
    assert scraped(client)[("guard_ready",)] == 0


def test_every_metric_of_the_board_exists(client: Client) -> None:
    client.post("/v1/check", json={"messages": MESSAGES})
    exposed = {name for name, *_ in scraped(client)}
    used: set[str] = set()
    for expression in re.findall(r'"expr": "(.*)"', BOARD.read_text(encoding="utf-8")):
        without_labels = re.sub(r'"[^"]*"|by \([^)]*\)', "", expression.replace('\\"', '"'))
        used |= set(re.findall(r"\b(?:guard|process)_[a-z0-9_]+", without_labels))
    assert len(used) > 10
    declared = re.findall(r"# TYPE (guard_\S+)", client.get("/metrics").text)
    assert used - exposed - set(declared) == set()
    unseen = {name for name in exposed if name.startswith("guard_")} - used
    # Parts of histograms, the times of counters, and what only alerts need.
    assert {name for name in unseen if not re.search("_(sum|count|created|bucket)$", name)} == {
        "guard_rules_served",
        "guard_engine_restarts_total",
        "guard_cache_capacity_tokens",
    }
