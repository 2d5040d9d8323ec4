"""`GET /metrics` for Prometheus: checks, verdicts, tokens, adapters, and what waits.

Labels are names from the server's own files: rules, rule sets, tenants, formats. Knows nothing of
what was checked. `setup/grafana/centurion.json` is a board of these.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from guard.weights.card import Card
from serve.api.observe.record import CheckRecord, StreamRecord
from serve.engine.codes import CODES
from serve.engine.thread.engine_thread import EngineThread

# Seconds, from a cached suffix to the default timeout.
LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
POLICIES = "#policies"  # of all that requests state, whose numbers mean nothing; no rule is so
VERDICTS = ("allow", "violation", "unjudged")


class Metrics:
    """Counts checks and requests; an Observer."""

    def __init__(self, rules: Mapping[str, Card]) -> None:
        self.rules = rules
        self.registry = CollectorRegistry()
        counter = functools.partial(Counter, registry=self.registry)
        histogram = functools.partial(Histogram, buckets=LATENCIES, registry=self.registry)
        # How long requests take from their heads to the ends of their responses, and checks that
        # are answered from their arrival to their verdicts.
        self._requests = histogram("guard_request_seconds", "Requests.", ["format", "status"])
        self._latency = histogram("guard_check_seconds", "Answered checks.", ["rule_set"])
        by_answer = ["tenant", "rule_set", "verdict"]
        self._checks = counter("guard_checks", "Checks answered, by their verdicts.", by_answer)
        self._failures = counter("guard_check_failures", "Checks without any answer.", ["code"])
        self._unjudged = counter("guard_unjudged", "Rules unjudged in answered checks.", ["code"])
        self._verdicts = counter("guard_verdicts", "Rules judged, or not.", ["rule", "verdict"])
        by_version = ["rule", "version", "mode", "decides", "verdict"]
        text = "What each version of a rule said, where not all is enforced."
        self._on_trial = counter("guard_trial_verdicts", text, by_version)
        text = "Checks at which a version on trial and its champion disagreed."
        self._disagreed = counter("guard_trial_disagreements", text, ["rule", "version"])
        self._uncertain = counter("guard_uncertain_verdicts", "Not confident.", ["rule"])
        self._tokens = counter("guard_tokens", "Prompt tokens of answered checks.", ["source"])
        text = "Checks that were to be kept for review, and could not be."
        self.reviews_dropped = counter("guard_reviews_dropped", text)
        ProcessCollector(registry=self.registry)
        self._begin_at_zero(rules)

    def _begin_at_zero(self, rules: Mapping[str, Card]) -> None:
        """Let what may be counted exist: a rate over a series that appears late misses a count."""
        for rule in rules:
            self._uncertain.labels(rule)
            for verdict in VERDICTS:
                self._verdicts.labels(rule, verdict)
        for code in CODES:
            self._failures.labels(code)
            self._unjudged.labels(code)
        for source in ("cached", "computed"):
            self._tokens.labels(source)

    def responded(self, wire_format: str, status: int, latency_s: float) -> None:
        self._requests.labels(wire_format, str(status)).observe(latency_s)

    def checked(self, record: CheckRecord) -> None:
        if record.failure is not None or record.check is None:
            self._failures.labels(record.failure or "engine_failed").inc()
            return
        self._tokens.labels("cached").inc(record.check.cached_tokens)
        self._tokens.labels("computed").inc(record.check.computed_tokens)
        if record.purpose != "answer":
            return  # of a part of a conversation whose check is counted
        rule_set = record.rule_set.name or ""
        self._latency.labels(rule_set).observe(record.latency_s)
        self._checks.labels(record.request.tenant or "", rule_set, record.verdict).inc()
        for verdict in record.check.verdicts:
            rule = POLICIES if verdict.rule in record.policies else verdict.rule
            self._verdicts.labels(rule, verdict.word).inc()
            self._uncertain.labels(rule).inc(not verdict.confident)
        for said in record.said:
            labels = (said.rule, said.version, said.mode, str(said.decides).lower(), said.word)
            self._on_trial.labels(*labels).inc()
        for trial, champion in record.trials():
            disagreed = self._disagreed.labels(trial.rule, trial.version)
            disagreed.inc(trial.disagrees(champion))
        for rule, refusal in record.check.refused.items():
            rule = POLICIES if rule in record.policies else rule
            self._verdicts.labels(rule, "unjudged").inc()
            self._unjudged.labels(refusal.code).inc()

    def streamed(self, record: StreamRecord) -> None: ...

    def close(self) -> None: ...

    def exposition(
        self, accept: str, registry: CollectorRegistry | None = None
    ) -> tuple[bytes, str]:
        """All metrics, or another registry's, as the client accepts them, and the content type."""
        encode, content_type = choose_encoder(accept)
        return encode(registry or self.registry), content_type


class EngineCollector(Collector):
    """The figures of the engine and its thread, read when Prometheus scrapes them."""

    def __init__(self, thread: EngineThread, rules: Mapping[str, Card]) -> None:
        self._thread = thread
        self._rules = rules

    def collect(self) -> Iterator[Metric]:
        thread, counters = self._thread, self._thread.counters
        gauges = {
            "guard_ready": ("1 while checks are taken.", float(thread.is_ready)),
            "guard_checks_waiting": ("Checks that are queued.", thread.waiting),
            "guard_checks_open": ("Checks in the engine.", thread.open),
            "guard_rules_served": ("Rules that can be asked.", len(self._rules)),
            "guard_adapters": ("Adapters in memory.", counters.adapters),
            "guard_cache_capacity_tokens": ("The prefix cache's size.", counters.cache_tokens),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value)
        totals = {
            "guard_adapter_loads": ("Adapters read from disk.", counters.adapter_loads),
            "guard_adapter_swap_ins": ("Adapters copied into a slot.", counters.swap_ins),
            "guard_engine_tokens": ("Tokens computed in steps.", counters.scheduled_tokens),
            "guard_engine_forward_passes": ("Steps of the model.", counters.forward_passes),
            "guard_engine_step_seconds": ("Time spent in steps.", counters.step_s),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(name, text, value)
        text = "Starts of the engine after it had died, by outcome."
        counts = CounterMetricFamily("guard_engine_restarts", text, labels=["outcome"])
        restarts = self._thread.restarts
        counts.add_metric(["started"], restarts.started)
        counts.add_metric(["failed"], restarts.failed)
        yield counts
        # Which version answers which rule: to join with the others by `rule`.
        text, labels = "A rule's version, and what answers.", ["rule", "version", "by"]
        info = GaugeMetricFamily("guard_rule_info", text, labels=labels)
        for rule, card in self._rules.items():
            info.add_metric([rule, card.version, card.by], 1.0)
        yield info
