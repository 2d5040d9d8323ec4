"""The cluster benchmark's numbers: `runs/cluster_bench.json` and the table in the terminal.

Knows nothing of servers.
"""

from __future__ import annotations

from guard.files.yaml_file import Strict
from serve.bench.report import BenchReport, Spread, notes, source

SCALED = "1-2"  # the replicas of the autoscaling part, as `--replicas` takes them


class LayerCost(Strict):
    """The times of a check by one server and through the ingress."""

    rules: int
    tokens: int
    server_ms: Spread
    cluster_ms: Spread
    server_again_ms: Spread  # the same conversation again: suffixes only
    cluster_again_ms: Spread


class ShardCost(Strict):
    """A check of all rules by so many shards: its time, and the median of its computed tokens.

    `first`: the check of a new conversation. `again`: the check of the same one once more.
    """

    shards: int
    rules: int
    tokens: int
    first_ms: Spread
    again_ms: Spread
    first_tokens: int
    again_tokens: int


class SessionAffinity(Strict):
    """Checks of conversations that grow. Tokens are the medians of what a check computed."""

    checks: int
    kept: float  # share that came to the replica of the check before
    replicas: int
    first_tokens: int
    second_tokens: int
    second_anew_tokens: int


class UnderFault(Strict):
    """What became of checks during events, and how long each event took."""

    events: int
    judged: int
    unjudged: int
    lost: int
    false_allows: int
    contradicted: int
    moved: int  # judged by another replica than the same conversation before
    event_ms: Spread


class VersionsSeen(Strict):
    """Answers of many texts at once while a rule was replaced."""

    answers: int
    mixed: int  # by two versions
    late: int  # by the old version, although the new one was served


class LoadWindow(Strict):
    """The checks that were judged while nothing changed."""

    replicas: int
    senders: int
    seconds: float
    per_s: float
    p50_ms: float
    p95_ms: float


class Autoscaled(Strict):
    """One rise of the load, and its end.

    `second_s`: the time from the rise until the first answer of the second replica. `down_s`: the
    time from the end of the rise until there is only one replica. The counts of checks cover the
    whole measurement.
    """

    second_s: float
    down_s: float
    windows: tuple[LoadWindow, ...]
    judged: int
    unjudged: int
    lost: int
    false_allows: int
    contradicted: int


class ClusterReport(BenchReport):
    """Everything in `runs/cluster_bench.json`; a part that was left out is None."""

    replicas: int
    cost: LayerCost | None
    shards: list[ShardCost] | None = None
    affinity: SessionAffinity | None
    changes: UnderFault | None
    versions_seen: VersionsSeen | None
    kills: UnderFault | None  # of replicas without a model
    engine_kills: UnderFault | None
    autoscaling: Autoscaled | None = None


def table(report: ClusterReport) -> str:
    """The report as text."""
    lines: list[str] = []
    if report.cost is not None:
        lines += _cost_lines(report.cost)
    for shard_cost in report.shards or ():
        lines.append(_shard_line(shard_cost))
    if report.affinity is not None:
        lines += _affinity_lines(report.affinity)
    faults = {
        "changes of a rule": report.changes,
        "replicas killed": report.kills,
        "replicas with an engine killed": report.engine_kills,
    }
    for name, fault in faults.items():
        if fault is not None:
            lines.append(_fault_line(name, fault))
    if report.autoscaling is not None:
        lines += _autoscaling_lines(report.autoscaling)
    if report.versions_seen is not None:
        lines.append(_versions_line(report.versions_seen))
    lines += notes(
        "Each: from the request for a change to its answer; from a kill until all replicas are",
        f"ready again. {source(report)}; random aLoRAs.",
    )
    return "\n".join(lines)


def _cost_lines(cost: LayerCost) -> list[str]:
    return [
        f"{cost.rules} rules x {cost.tokens:,} tokens, ms: new conversation, the same again",
        f"one server            {cost.server_ms.text(1)}   {cost.server_again_ms.text(1)}",
        f"one replica, ingress  {cost.cluster_ms.text(1)}   {cost.cluster_again_ms.text(1)}",
    ]


def _shard_line(cost: ShardCost) -> str:
    return (
        f"{cost.shards} shards, {cost.rules} rules x {cost.tokens:,} tokens: "
        f"{cost.first_ms.text(1)} ms and {cost.first_tokens} tokens computed, "
        f"again {cost.again_ms.text(1)} ms and {cost.again_tokens}"
    )


def _affinity_lines(affinity: SessionAffinity) -> list[str]:
    return [
        f"{affinity.checks} further checks of conversations: {affinity.kept:.1%} on their replica, "
        f"of {affinity.replicas}",
        f"tokens computed: first check {affinity.first_tokens}, second {affinity.second_tokens}, "
        f"anew it would be {affinity.second_anew_tokens}",
    ]


def _fault_line(name: str, fault: UnderFault) -> str:
    return (
        f"{fault.events} {name}: {fault.judged} judged, {fault.unjudged} unjudged (503), "
        f"{fault.lost} lost, {fault.false_allows} false allows, "
        f"{fault.contradicted} other or missing verdicts, {fault.moved} moved; "
        f"each {fault.event_ms.text()} ms"
    )


def _versions_line(versions: VersionsSeen) -> str:
    return (
        f"{versions.answers} answers of 16 texts: {versions.mixed} of two versions, "
        f"{versions.late} of an old one"
    )


def _autoscaling_lines(scaled: Autoscaled) -> list[str]:
    lines = [
        f"{SCALED} replicas: the second answers {scaled.second_s:.0f} s after the load has risen "
        f"and is gone {scaled.down_s:.0f} s after its end; {scaled.judged} judged, "
        f"{scaled.unjudged} unjudged (503), {scaled.lost} lost, {scaled.false_allows} false allows"
    ]
    for window in scaled.windows:
        lines.append(
            f"{window.senders} senders, {window.replicas} there: {window.per_s:.1f} checks/s, "
            f"p50 {window.p50_ms:.0f} ms, p95 {window.p95_ms:.0f} ms, of {window.seconds:.0f} s"
        )
    return lines
