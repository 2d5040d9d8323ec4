"""A span of OpenTelemetry for every check, in the trace that the caller's `traceparent` names.

The span has the verdict, the rule set and the tokens; each rule is an event. No content. OTel's own
attributes for guardrails are not stable yet, so the names are ours.
"""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve.api.observe.record import CheckRecord, StreamRecord
from serve.engine import Check

SPAN = "guard.check"
NS = 1_000_000_000


class Traces:
    """Hands spans to an exporter, in batches; an Observer."""

    def __init__(self, exporter: SpanExporter) -> None:
        resource = Resource.create({"service.name": "centurion"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("centurion")

    @classmethod
    def to_collector(cls, address: str) -> Traces:
        """Traces that go to the OTLP receiver at `address`, over HTTP: `http://collector:4318`."""
        # Only where there are traces: it brings its own HTTP client and protobuf.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=f"{address.rstrip('/')}/v1/traces"))

    def checked(self, record: CheckRecord) -> None:
        began_ns = int(record.began_s * NS)
        span = self._tracer.start_span(
            SPAN, context=_parent(record), kind=SpanKind.SERVER, start_time=began_ns
        )
        assert isinstance(span, Span)
        _describe(span, record)
        ended_ns = began_ns + int(record.latency_s * NS)
        if record.check is not None:
            _add_rules(span, record.check, ended_ns)
        span.end(ended_ns)

    def streamed(self, record: StreamRecord) -> None: ...

    def close(self) -> None:
        self._provider.shutdown()


def _parent(record: CheckRecord) -> Context:
    """The caller's span; without a well-formed `traceparent`, none."""
    carrier = {"traceparent": record.request.traceparent or ""}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def _describe(span: Span, record: CheckRecord) -> None:
    request = record.request
    attributes = {
        "guard.request_id": request.request_id,
        "guard.format": request.wire_format,
        "guard.tenant": request.tenant or "",
        "guard.rule_set": record.rule_set.name or "",
        "guard.verdict": record.verdict,
        "guard.purpose": record.purpose,
    }
    span.set_attributes(attributes)
    if record.decision is not None:
        span.set_attribute("guard.decided_by", list(record.decision.decided_by))
    if record.check is not None:
        span.set_attribute("guard.cached_tokens", record.check.cached_tokens)
        span.set_attribute("guard.computed_tokens", record.check.computed_tokens)
    if record.failure is not None:
        span.set_status(Status(StatusCode.ERROR, record.failure))


def _add_rules(span: Span, check: Check, time_ns: int) -> None:
    for verdict in check.verdicts:
        attributes: dict[str, str | float] = {
            "guard.rule": verdict.rule,
            "guard.verdict": verdict.word,
            "guard.p_violation": verdict.p_violation,
            "guard.threshold": verdict.threshold,
            "guard.by": verdict.by,
        }
        span.add_event("guard.rule", attributes, timestamp=time_ns)
    for rule, refusal in check.refused.items():
        attributes = {"guard.rule": rule, "guard.verdict": "unjudged", "guard.code": refusal.code}
        span.add_event("guard.rule", attributes, timestamp=time_ns)
