"""Replicas on Ray against one server: how much more a check costs, what it costs where rules are
split over shards, whether conversations stay where they are, and what becomes of checks while
replicas are killed and rules are replaced.

Everything runs on this machine, over HTTP, with random adapters.

- Cost: one server, and one replica behind the ingress, asked in turns.
- Shards: the same rules on one and on two shards of one replica each, asked for all in turns.
- Autoscaling: one replica, and a second one while the load needs it. It ends sooner than after
  Ray's ten minutes; everything else is as Ray has it.
- The other parts: two replicas. Most kills are of replicas without a model (`words.py`), because
  these are back in a moment.

A false allow is an allow, whatever its results, where an undisturbed server found a violation that
is not near its threshold; a lost answer is neither a verdict nor status 503.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
from tqdm import tqdm

from guard.recipe import Recipe, load_recipe
from serve.bench.cluster.autoscaling import measure_autoscaling
from serve.bench.cluster.load import LoadOutcomes
from serve.bench.cluster.measure import (
    RULES,
    check_costs,
    checks_of,
    kill_replicas_under_load,
    measure_affinity,
    replace_rule_under_load,
    word_checks_of,
)
from serve.bench.cluster.report import (
    SCALED,
    Autoscaled,
    ClusterReport,
    LayerCost,
    SessionAffinity,
    ShardCost,
    UnderFault,
    VersionsSeen,
    table,
)
from serve.bench.cluster.servers import REPLICAS, MeasuredServer, served, served_words
from serve.bench.command import add_count, add_parts
from serve.bench.http.server import random_runs, server_process
from serve.bench.report import Spread, median_count, origin, peak_of_processes_mib, publish

PARTS = ("cost", "shards", "affinity", "changes", "kills", "engine_kills", "autoscaling")
PARTS_OF_TWO_REPLICAS = ("affinity", "changes", "engine_kills")  # by one server with engines
PARTS_WITH_EVENTS = ("changes", "kills", "engine_kills")
COST_RULES, COST_TOKENS, REPEATS = 20, 1000, 40
SHARDS = (1, 2)
SESSIONS, TURNS = 40, 4
CHANGES, KILLS, ENGINE_KILLS = 20, 50, 3
SCALE_DOWN_S = 20
SCALING_EVENTS = 3  # a second replica answers, the load falls, it is gone


class ClusterBench:
    """Measures part by part, and has the report of the parts that were measured so far.

    `events`: the number of changes or kills, by part.
    """

    def __init__(
        self, recipe: Recipe, repeats: int, sessions: int, events: Mapping[str, int]
    ) -> None:
        self.recipe, self.repeats, self.sessions, self.events = recipe, repeats, sessions, events
        self.measured: dict[str, Any] = {}  # the report's fields of the parts
        self._peaks_mib: list[float] = []  # of the servers and their replicas, part by part

    @property
    def report(self) -> ClusterReport:
        """The report of what was measured so far."""
        fields: dict[str, Any] = dict.fromkeys((*PARTS, "versions_seen"))
        fields |= self.measured
        return ClusterReport(**origin(self.recipe, *self._peaks_mib), replicas=REPLICAS, **fields)

    def measure(self, parts: Sequence[str]) -> None:
        """Measure the chosen parts. Raises GuardError if one cannot be measured."""
        if "cost" in parts:
            self.measured["cost"] = _cost(self.recipe, self.repeats, self._peaks_mib)
        if "shards" in parts:
            self.measured["shards"] = _shards(self.recipe, self.repeats, self._peaks_mib)
        total = sum(count for part, count in self.events.items() if part in parts)
        with tqdm(total=total, desc="cluster", unit="event") as bar:
            if set(parts) & set(PARTS_OF_TWO_REPLICAS):
                self._two_replicas(parts, bar.update)
            if "kills" in parts:
                kills = self.events["kills"]
                self.measured["kills"] = _word_replicas(kills, bar.update, self._peaks_mib)
        if "autoscaling" in parts:
            self.measured["autoscaling"] = _autoscaling(self.recipe, self._peaks_mib)

    def _two_replicas(self, parts: Sequence[str], on_event: Callable[[], Any]) -> None:
        """Measure those parts that one server with two replicas can measure."""
        with served(self.recipe, RULES, "--replicas", str(REPLICAS)) as server:
            try:
                self._on_two_replicas(server, parts, on_event)
            finally:
                self._peaks_mib.append(peak_of_processes_mib())

    def _on_two_replicas(
        self, server: MeasuredServer, parts: Sequence[str], on_event: Callable[[], Any]
    ) -> None:
        recipe, events = self.recipe, self.events
        if "affinity" in parts:
            affinity = _affinity(server.client, recipe, server.rules, self.sessions)
            self.measured["affinity"] = affinity
        if "changes" in parts:
            seen = replace_rule_under_load(server, recipe, events["changes"], on_event)
            self.measured["changes"] = _under_fault(seen.outcomes, seen.change_ms)
            self.measured["versions_seen"] = VersionsSeen(
                answers=seen.answers, mixed=seen.mixed, late=seen.late
            )
        if "engine_kills" in parts:
            checks = checks_of(server, recipe, server.rules)
            killed = kill_replicas_under_load(server, checks, events["engine_kills"], on_event)
            self.measured["engine_kills"] = _under_fault(*killed)


def _word_replicas(kills: int, on_event: Callable[[], Any], peaks_mib: list[float]) -> UnderFault:
    """Kill replicas that have no model."""
    with served_words(RULES) as server:
        killed = kill_replicas_under_load(server, word_checks_of(server), kills, on_event)
        peaks_mib.append(peak_of_processes_mib())
    return _under_fault(*killed)


def _cost(recipe: Recipe, repeats: int, peaks_mib: list[float]) -> LayerCost:
    with (
        random_runs(recipe, COST_RULES) as runs,
        server_process(recipe, runs) as server,
        server_process(recipe, runs, "--replicas", "1") as cluster,
        httpx.Client(base_url=server.address, timeout=90, trust_env=False) as server_client,
        httpx.Client(base_url=cluster.address, timeout=90, trust_env=False) as cluster_client,
    ):
        alone, layered = check_costs(
            (server_client, cluster_client), recipe, COST_RULES, COST_TOKENS, repeats
        )
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
    """Measure the same rules on each number of shards in SHARDS, one replica a shard."""
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
        shard_cost = ShardCost(
            shards=shards,
            rules=COST_RULES,
            tokens=COST_TOKENS,
            first_ms=Spread.of(cost.first_ms, with_p95=True),
            again_ms=Spread.of(cost.again_ms, with_p95=True),
            first_tokens=median_count(cost.first_tokens),
            again_tokens=median_count(cost.again_tokens),
        )
        measured.append(shard_cost)
    return measured


def _autoscaling(recipe: Recipe, peaks_mib: list[float]) -> Autoscaled:
    options = ("--replicas", SCALED, "--scale-down", str(SCALE_DOWN_S))
    with (
        served(recipe, RULES, *options) as server,
        tqdm(total=SCALING_EVENTS, desc="autoscaling", unit="event") as bar,
    ):
        checks = checks_of(server, recipe, server.rules)
        scaled = measure_autoscaling(server.client, checks, on_event=bar.update)
        peaks_mib.append(peak_of_processes_mib())
        return scaled


def _affinity(
    client: httpx.Client, recipe: Recipe, rules: Sequence[str], sessions: int
) -> SessionAffinity:
    measured = measure_affinity(client, recipe, rules, sessions, TURNS)
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


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_parts(parser, PARTS)
    add_count(parser, "--repeats", REPEATS, "checks by each server for the cost")
    add_count(parser, "--sessions", SESSIONS, "conversations that grow")
    add_count(parser, "--changes", CHANGES, "how often a rule is replaced")
    add_count(parser, "--kills", KILLS, "replicas without a model to kill, one after the other")
    add_count(parser, "--engine-kills", ENGINE_KILLS, "replicas with an engine to kill")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report, print the table.

    If a part cannot be measured, the report has those that were measured before it.
    """
    recipe = load_recipe(arguments.model)
    events = {part: getattr(arguments, part) for part in PARTS_WITH_EVENTS}
    bench = ClusterBench(recipe, arguments.repeats, arguments.sessions, events)
    try:
        bench.measure(arguments.parts)
    finally:
        if bench.measured:
            publish(bench.report, arguments.runs / "cluster_bench.json", table)
