"""Affinity, cache hits and latency on many replicas: against turns, churn and load; two routers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from guard.errors import GuardError
from guard.machine.provenance import provenance
from serve.engine.thread.engine_thread import MAX_OPEN
from serve.plan.build import planned_load
from serve.plan.deployment import PlannedMethod, deploy
from serve.plan.device.step_cost import StepWork
from serve.plan.money import SECONDS_AN_HOUR
from serve.plan.plan_file import Plan
from serve.plan.replay.replica import copies_of
from serve.plan.routing.report import RoutingReport, RoutingRow
from serve.plan.routing.ring import ROUTERS
from serve.plan.routing.simulate import FleetSimulation, ReplicaRoom, ServiceS
from serve.plan.routing.turns import draw_turns
from serve.plan.traffic.generate import TrafficShape

TURNS = (2.0, 5.0, 12.0)  # mean number in a conversation
CHURN = (0.0, 0.02, 0.1)  # share of the replicas that is replaced each minute
LOADS = (0.3, 0.6, 0.85)  # share of a replica's time at work, if no cache hits
THINK_S = 10.0  # mean time between two turns
MAX_ONGOING = 2 * MAX_OPEN  # checks at a replica before it refuses: as serve/cluster/ray_pool.py
COUNTED_TURNS = 60_000  # in each run, after those that fill the caches


def service_of(method: PlannedMethod) -> ServiceS:
    """A function for the seconds that a lone check takes at a replica of the method."""
    limits, suffix = method.sizes.limits, method.suffix_tokens

    def seconds(tokens: int, cached: int, rules: int) -> float:
        copies = copies_of(rules, shares=method.shares)
        new = (tokens - cached) * copies
        computed = new + rules * suffix
        pairs = copies * (tokens - cached) * (tokens + cached) / 2 + rules * suffix * tokens
        work = StepWork(
            steps=math.ceil(computed / limits.step_tokens),
            tokens=computed,
            adapted=rules * suffix if method.shares else computed,
            pairs=pairs,
            reads=rules * tokens,
            sequences=rules,
        )
        return (method.cost.step_ms(work) + method.cost.submit_ms(tokens, rules)) / 1000

    return seconds


def study(plan: Plan, runs: Path, replicas: int, conversations_an_hour: int) -> RoutingReport:
    """Simulate the grid of turns and churn, then several loads.

    Raises GuardError as `deploy`, and for a plan with a trace.
    """
    if plan.traffic.trace is not None:
        raise GuardError(
            "many replicas are simulated with drawn conversations, not with a trace",
            where=f"plan {plan.name}: traffic.trace",
            got=plan.traffic.trace,
            remedy="Leave the trace out and state lengths, rules and rules_a_check like its own",
        )
    plan, load = planned_load(plan, runs)
    deployment = deploy(plan, runs)
    method = deployment.methods[0]
    shape = replace(load.source.shape, think_s=THINK_S)
    cells = [(turns, churn, replicas) for turns in TURNS for churn in CHURN]
    for share in LOADS:
        cells.append((TURNS[1], 0.0, _replicas_for(method, shape, conversations_an_hour, share)))
    rows = []
    for turns, churn, count in tqdm(cells, desc="routing", unit="cell"):
        rows += _rows(method, replace(shape, turns=turns), churn, count, conversations_an_hour)
    return RoutingReport(
        name=plan.name,
        commit=provenance()["commit"],
        hardware=deployment.hardware,
        model=plan.model,
        method=method.name,
        source=f"{deployment.basis}: {deployment.source}",
        conversations_an_hour=conversations_an_hour,
        think_s=THINK_S,
        max_ongoing=MAX_ONGOING,
        rows=tuple(rows),
    )


def _replicas_for(
    method: PlannedMethod, shape: TrafficShape, conversations_an_hour: int, share: float
) -> int:
    """The number of replicas that are each at work for this share of their time, if no cache ever
    hits.
    """
    seconds = service_of(method)
    mean_tokens = shape.mean_length * (1 + 1 / TURNS[1]) / 2
    service_s = seconds(round(mean_tokens), 0, round(sum(shape.rules_a_check) / 2))
    checks_per_second = conversations_an_hour * TURNS[1] / SECONDS_AN_HOUR
    return max(3, math.ceil(checks_per_second * service_s / share))


def _rows(
    method: PlannedMethod,
    shape: TrafficShape,
    churn: float,
    replicas: int,
    conversations_an_hour: int,
) -> list[RoutingRow]:
    sessions_per_second = conversations_an_hour / SECONDS_AN_HOUR
    counted_s = COUNTED_TURNS / (sessions_per_second * shape.turns)
    drawn = draw_turns(shape, sessions_per_second, counted_s, seed=0)
    room = ReplicaRoom(method.sizes.cache_tokens, method.sizes.limits.block_size, MAX_ONGOING)
    rows = []
    for name, router in ROUTERS.items():
        simulation = FleetSimulation(
            replicas,
            room,
            service_of(method),
            router(list(range(replicas))),
            churn,
            shares=method.shares,
        )
        outcome = simulation.run(drawn)
        rows.append(
            RoutingRow(
                router=name, turns=shape.turns, churn=churn, replicas=replicas, **vars(outcome)
            )
        )
    return rows
