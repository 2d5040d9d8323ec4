"""OpenTelemetry's spans: a check's in its caller's trace, and sent to a receiver over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from serve.api.app import create_app
from serve.api.observe.record import RequestFacts
from serve.api.observe.traces import NS, SPAN, Traces
from tests.serve.api.observe.toy_record import MARKER, record
from tests.serve.serving import serving
from tests.serve.toy_engine import LOGITS, RULE_SETS, ToyEngine


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
    assert answered.context is not None and f"{answered.context.trace_id:032x}" == "a" * 32
    assert f"{answered.parent.span_id:016x}" == "b" * 16
    assert answered.start_time is not None and answered.end_time is not None
    assert answered.end_time - answered.start_time == NS // 8
    attributes = dict(answered.attributes or {})
    assert attributes["guard.verdict"] == "violation"
    assert attributes["guard.decided_by"] == ("flagged",)
    assert attributes["guard.tenant"] == "shop"
    rules = [dict(event.attributes or {}) for event in answered.events]
    verdicts = [(rule["guard.rule"], rule["guard.verdict"]) for rule in rules]
    assert verdicts == [("flagged", "violation"), ("fine", "allow"), ("broken", "unjudged")]
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "too_late")


@contextmanager
def receiver() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """An OTLP receiver's address, and (path, body) of what it was sent."""
    received: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            received.append((self.path, self.rfile.read(length)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_spans_reach_a_receiver_and_have_no_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with receiver() as (address, received):
        traces = Traces.to_collector(address)
        app = create_app(ToyEngine(LOGITS), rule_sets=RULE_SETS, observers=[traces])  # type: ignore[arg-type]
        body = {"messages": [{"role": "user", "content": MARKER}], "rule_set": "both"}
        headers = {"traceparent": f"00-{'c' * 32}-{'d' * 16}-01"}
        with serving(app) as client:
            assert client.post("/v1/check", json=body, headers=headers).status_code == 200
    ((path, content),) = received
    assert path == "/v1/traces" and MARKER.encode() not in content
    (span,) = ExportTraceServiceRequest.FromString(content).resource_spans[0].scope_spans[0].spans
    ids = (span.trace_id.hex(), span.parent_span_id.hex())
    assert (span.name, *ids) == (SPAN, "c" * 32, "d" * 16)
