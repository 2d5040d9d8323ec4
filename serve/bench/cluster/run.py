"""Replicas on Ray against one server: what a check costs more, what it costs where rules are split
over shards, whether conversations stay where they are, and what comes of checks while replicas are
killed and rules change.

All on this machine, over HTTP, on random adapters. Cost: one server, and one replica behind the
ingress, asked in turns. Shards: the same rules on one and on two shards of one replica, asked in
turns for all of them. Autoscaling: one replica, and a second one while the load needs it; only the
time until that one ends is less than Ray's ten minutes. The other parts: two
replicas; most of them are killed that have no model (`words.py`), because these are back in a
moment. A false allow is an allow where an undisturbed
server found a violation; a lost answer is neither a verdict nor status 503.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any

import httpx
from tqdm import tqdm

from guard.files.yaml_file import Strict
from guard.recipe import Recipe, load_recipe
from serve.bench.cluster.autoscaling import Autoscaled, autoscaled
from serve.bench.cluster.load import LoadOutcomes
from serve.bench.cluster.measure import (
    RULES,
    affinity,
    changed,
    check_costs,
    checks_of,
    killed,
    words_of,
)
from serve.bench.cluster.servers import REPLICAS, served, served_words
from serve.bench.command import add_count, add_parts
from serve.bench.http.server import random_runs, server_process
from serve.bench.report import (
    BenchReport,
    Spread,
    median_count,
    notes,
    origin,
    peak_of_processes_mib,
    publish,
    source,
)

PARTS = ("cost", "shards", "affinity", "changes", "kills", "engine_kills", "autoscaling")
PART_FIELDS = ("affinity", "changes", "versions_seen", "kills", "engine_kills")
COST_RULES, COST_TOKENS, REPEATS = 20, 1000, 40
SHARDS = (1, 2)
SESSIONS, TURNS = 40, 4
CHANGES, KILLS, ENGINE_KILLS = 20, 50, 3
SCALED, SCALE_DOWN_S = "1-2", 20
SCALING_EVENTS = 3  # a second replica answers, the load falls, it is gone


class LayerCost(Strict):
    """A check by one server and through the ingress, in milliseconds."""

    rules: int
    tokens: int
    server_ms: Spread
    cluster_ms: Spread
    server_again_ms: Spread  # the same conversation again: suffixes only
    cluster_again_ms: Spread


class ShardCost(Strict):
    """A check of all rules by so many shards, in milliseconds, and the median of its computed
    tokens: of a new conversation, and of the same one again.
    """

    shards: int
    rules: int
    tokens: int
    first_ms: Spread
    again_ms: Spread
    first_tokens: int
    again_tokens: int


class SessionAffinity(Strict):
    """Checks of conversations that grow; tokens are medians of a check's computed ones."""

    checks: int
    kept: float  # share that came to the replica of the check before
    replicas: int
    first_tokens: int
    second_tokens: int
    second_anew_tokens: int


class UnderFault(Strict):
    """What came of checks while something happened, and what that took in milliseconds."""

    events: int
    judged: int
    unjudged: int
    lost: int
    false_allows: int
    contradicted: int
    moved: int  # judged by another replica than the same conversation before
    event_ms: Spread


class VersionsSeen(Strict):
    """Answers of many texts at once while a rule changed."""

    answers: int
    mixed: int
    late: int


class ClusterReport(BenchReport):
    """Everything in `runs/cluster_bench.json`; a part that was left out is missing."""

    replicas: int
    cost: LayerCost | None
    shards: list[ShardCost] | None
    affinity: SessionAffinity | None
    changes: UnderFault | None
    versions_seen: VersionsSeen | None
    kills: UnderFault | None  # of replicas without a model
    engine_kills: UnderFault | None
    autoscaling: Autoscaled | None = None


def run(
    recipe: Recipe,
    parts: Sequence[str] = PARTS,
    *,
    repeats: int = REPEATS,
    sessions: int = SESSIONS,
    changes: int = CHANGES,
    kills: int = KILLS,
    engine_kills: int = ENGINE_KILLS,
) -> ClusterReport:
    """Measure the parts."""
    peaks_mib: list[float] = []  # of the servers and their replicas, part by part
    cost = _cost(recipe, repeats, peaks_mib) if "cost" in parts else None
    shards = _shards(recipe, repeats, peaks_mib) if "shards" in parts else None
    measured: dict[str, Any] = dict.fromkeys(PART_FIELDS)
    events = {"changes": changes, "kills": kills, "engine_kills": engine_kills}
    total = sum(count for part, count in events.items() if part in parts)
    with tqdm(total=total, desc="cluster", unit="event") as bar:
        if set(parts) & {"affinity", "changes", "engine_kills"}:
            with served(recipe, RULES, "--replicas", str(REPLICAS)) as server:
                if "affinity" in parts:
                    measured["affinity"] = _affinity(server.client, recipe, server.rules, sessions)
                if "changes" in parts:
                    seen = changed(server, recipe, changes, bar.update)
                    measured["changes"] = _under_fault(seen.outcomes, seen.change_ms)
                    measured["versions_seen"] = VersionsSeen(
                        answers=seen.answers, mixed=seen.mixed, late=seen.late
                    )
                if "engine_kills" in parts:
                    checks = checks_of(server, recipe, server.rules)
                    measured["engine_kills"] = _under_fault(
                        *killed(server, checks, engine_kills, bar.update)
                    )
                peaks_mib.append(peak_of_processes_mib())
        if "kills" in parts:
            with served_words(RULES) as server:
                measured["kills"] = _under_fault(
                    *killed(server, words_of(server), kills, bar.update)
                )
                peaks_mib.append(peak_of_processes_mib())
    scaled = _autoscaling(recipe, peaks_mib) if "autoscaling" in parts else None
    return ClusterReport(
        **origin(recipe, *peaks_mib),
        replicas=REPLICAS,
        cost=cost,
        shards=shards,
        autoscaling=scaled,
        **measured,
    )


def _cost(recipe: Recipe, repeats: int, peaks_mib: list[float]) -> LayerCost:
    with (
        random_runs(recipe, COST_RULES) as runs,
        server_process(recipe, runs) as server,
        server_process(recipe, runs, "--replicas", "1") as cluster,
        httpx.Client(base_url=server.address, timeout=90, trust_env=False) as first,
        httpx.Client(base_url=cluster.address, timeout=90, trust_env=False) as second,
    ):
        alone, layered = check_costs((first, second), recipe, COST_RULES, COST_TOKENS, repeats)
        peaks_mib.append(peak_of_processes_mib())
    return LayerCost(
        rules=COST_RULES,
        tokens=COST_TOKENS,
        server_ms=Spread.of(alone.first_ms, with_p95=True),
        cluster_ms=Spread.of(layered.first_ms, with_p95=True),
        server_again_ms=Spread.of(alone.again_ms, with_p95=True),
        cluster_again_ms=Spread.of(layered.again_ms, with_p95=True),
    )


def _shards(recipe: Recipe, repeats: int, peaks_mib: list[float]) -> list[ShardCost]:
    """The same rules on as many shards as each of SHARDS says, one replica each."""
    with contextlib.ExitStack() as until_measured:
        runs = until_measured.enter_context(random_runs(recipe, COST_RULES))
        clients: list[httpx.Client] = []
        for shards in SHARDS:
            options = ("--replicas", "1", "--shards", str(shards))
            server = until_measured.enter_context(server_process(recipe, runs, *options))
            client = httpx.Client(base_url=server.address, timeout=90, trust_env=False)
            clients.append(until_measured.enter_context(client))
        costs = check_costs(clients, recipe, COST_RULES, COST_TOKENS, repeats)
        peaks_mib.append(peak_of_processes_mib())
    measured: list[ShardCost] = []
    for shards, cost in zip(SHARDS, costs, strict=True):
        of_shards = ShardCost(
            shards=shards,
            rules=COST_RULES,
            tokens=COST_TOKENS,
            first_ms=Spread.of(cost.first_ms, with_p95=True),
            again_ms=Spread.of(cost.again_ms, with_p95=True),
            first_tokens=median_count(cost.first_tokens),
            again_tokens=median_count(cost.again_tokens),
        )
        measured.append(of_shards)
    return measured


def _autoscaling(recipe: Recipe, peaks_mib: list[float]) -> Autoscaled:
    options = ("--replicas", SCALED, "--scale-down", str(SCALE_DOWN_S))
    with (
        served(recipe, RULES, *options) as server,
        tqdm(total=SCALING_EVENTS, desc="autoscaling", unit="event") as bar,
    ):
        checks = checks_of(server, recipe, server.rules)
        scaled = autoscaled(server.client, checks, on_event=bar.update)
        peaks_mib.append(peak_of_processes_mib())
        return scaled


def _affinity(
    client: httpx.Client, recipe: Recipe, rules: Sequence[str], sessions: int
) -> SessionAffinity:
    measured = affinity(client, recipe, rules, sessions, TURNS)
    return SessionAffinity(
        checks=measured.checks,
        kept=measured.kept / measured.checks,
        replicas=measured.replicas,
        first_tokens=median_count(measured.first_computed),
        second_tokens=median_count(measured.second_computed),
        second_anew_tokens=median_count(measured.second_anew),
    )


def _under_fault(outcomes: LoadOutcomes, event_ms: Sequence[float]) -> UnderFault:
    return UnderFault(
        events=len(event_ms),
        judged=outcomes.judged,
        unjudged=outcomes.unjudged,
        lost=outcomes.lost,
        false_allows=outcomes.false_allows,
        contradicted=outcomes.contradicted,
        moved=outcomes.moved,
        event_ms=Spread.of(event_ms),
    )


def table(report: ClusterReport) -> str:
    """The report as text."""
    lines: list[str] = []
    cost, kept, versions = report.cost, report.affinity, report.versions_seen
    if cost is not None:
        lines += [
            f"{cost.rules} rules x {cost.tokens:,} tokens, ms: new conversation, the same again",
            f"one server            {cost.server_ms.text(1)}   {cost.server_again_ms.text(1)}",
            f"one replica, ingress  {cost.cluster_ms.text(1)}   {cost.cluster_again_ms.text(1)}",
        ]
    for split in report.shards or ():
        lines.append(
            f"{split.shards} shards, {split.rules} rules x {split.tokens:,} tokens: "
            f"{split.first_ms.text(1)} ms and {split.first_tokens} tokens computed, "
            f"again {split.again_ms.text(1)} ms and {split.again_tokens}"
        )
    if kept is not None:
        lines += [
            f"{kept.checks} further checks of conversations: {kept.kept:.1%} on their replica, "
            f"of {kept.replicas}",
            f"tokens computed: first check {kept.first_tokens}, second {kept.second_tokens}, "
            f"anew it would be {kept.second_anew_tokens}",
        ]
    faults = {
        "changes of a rule": report.changes,
        "replicas killed": report.kills,
        "replicas with an engine killed": report.engine_kills,
    }
    for name, fault in faults.items():
        if fault is not None:
            lines.append(
                f"{fault.events} {name}: {fault.judged} judged, {fault.unjudged} unjudged (503), "
                f"{fault.lost} lost, {fault.false_allows} false allows, "
                f"{fault.contradicted} other verdicts, {fault.moved} moved; "
                f"each {fault.event_ms.text()} ms"
            )
    if report.autoscaling is not None:
        lines += _autoscaling_lines(report.autoscaling)
    if versions is not None:
        lines.append(
            f"{versions.answers} answers of 16 texts: {versions.mixed} of two versions, "
            f"{versions.late} of an old one"
        )
    lines += notes(
        "Each: from the order to the change to its answer; from a kill until all replicas are",
        f"ready again. {source(report)}; random aLoRAs.",
    )
    return "\n".join(lines)


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


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_parts(parser, PARTS)
    add_count(parser, "--repeats", REPEATS, "checks by each server for the cost")
    add_count(parser, "--sessions", SESSIONS, "conversations that grow")
    add_count(parser, "--changes", CHANGES, "changes of a rule")
    add_count(parser, "--kills", KILLS, "replicas without a model to kill, one after the other")
    add_count(parser, "--engine-kills", ENGINE_KILLS, "replicas with an engine to kill")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report, print the table."""
    report = run(
        load_recipe(arguments.model),
        arguments.parts,
        repeats=arguments.repeats,
        sessions=arguments.sessions,
        changes=arguments.changes,
        kills=arguments.kills,
        engine_kills=arguments.engine_kills,
    )
    publish(report, arguments.runs / "cluster_bench.json", table)
