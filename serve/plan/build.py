"""Turns a plan into its report: simulates and prices every method, says how numbers are known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from guard.machine.provenance import provenance
from serve.engine.backends.arguments import GIB
from serve.plan.capacity import (
    Capacity,
    TrafficSource,
    capacity,
    mean_rules,
    mean_tokens,
    trace_rate,
)
from serve.plan.deployment import Deployment, PlannedMethod, deploy
from serve.plan.device.accelerator import ComputedCost
from serve.plan.device.calibration import FittedCost
from serve.plan.figure import Basis, Figure, FigureRow, Section
from serve.plan.money import judge_prices, per_million_checks
from serve.plan.plan_file import Plan
from serve.plan.report import CurvePoint, PlanReport
from serve.plan.sharding import Layout, Sharding, sharding
from serve.plan.traffic.generate import TrafficShape
from serve.plan.traffic.trace import read_trace

SIMULATED = "simulated from the coefficients"
COUNTED = "counted from the base's shape and the recipe"


@dataclass(frozen=True)
class Outcome:
    """What the simulation says of a method. `sharding`: None where every rule has a slot."""

    method: PlannedMethod
    capacity: Capacity
    sharding: Sharding | None


@dataclass(frozen=True)
class PlannedLoad:
    """The deployment's traffic: a source for one replica's, and the means that prices need."""

    source: TrafficSource
    rate: float
    rules: float
    tokens: float
    left_out: int


def build(plan: Plan, runs: Path) -> PlanReport:
    """Work out the plan. Raises GuardError where the plan is not possible."""
    plan, load = planned_load(plan, runs)
    deployment = deploy(plan, runs)
    outcomes = [_outcome(method, load, plan) for method in deployment.methods]
    sections = [
        _step_section(deployment),
        _memory_section(outcomes),
        _replica_section(outcomes),
        _cost_section(deployment, load, outcomes),
    ]
    if any(outcome.sharding for outcome in outcomes):
        sections.append(_sharding_section(outcomes))
    return PlanReport(
        name=plan.name,
        commit=provenance()["commit"],
        hardware=deployment.hardware,
        model=plan.model,
        source=deployment.source,
        rate=load.rate,
        p95_target_ms=plan.p95_ms,
        sections=tuple(sections),
        curve=tuple(_curve(deployment, outcomes)),
    )


def planned_load(plan: Plan, runs: Path) -> tuple[Plan, PlannedLoad]:
    """The plan, with the rules and the rate of its trace if it has one, and its traffic."""
    traffic, trace = plan.traffic, None
    if traffic.trace is not None:
        suffix = plan.suffix_tokens or deploy(plan, runs).methods[0].suffix_tokens
        trace = read_trace(Path(traffic.trace), suffix)
        rules = max(len(trace.rules), traffic.rules)
        stated = "rate" in traffic.model_fields_set
        rate = traffic.rate if stated else trace_rate(trace.arrivals)
        traffic = traffic.model_copy(update={"rules": rules, "rate": rate})
        plan = plan.model_copy(update={"traffic": traffic})
    shape = TrafficShape(
        traffic.lengths,
        traffic.rules_a_check,
        traffic.rules,
        traffic.zipf,
        traffic.turns,
        traffic.think_s,
    )
    recorded = trace.arrivals if trace is not None else ()
    source = TrafficSource(shape, plan.checks, plan.seed, recorded)
    arrivals = source.at(traffic.rate).arrivals
    left_out = trace.left_out if trace is not None else 0
    load = PlannedLoad(source, traffic.rate, mean_rules(arrivals), mean_tokens(arrivals), left_out)
    return plan, load


def _outcome(method: PlannedMethod, load: PlannedLoad, plan: Plan) -> Outcome:
    has_slots = method.sizes.adapters <= method.sizes.limits.slots
    return Outcome(
        method,
        capacity(method, load.source, plan.p95_ms, plan.most_busy),
        None if has_slots else sharding(method, load.source),
    )


def _computed(value: float, unit: str, source: str = SIMULATED) -> Figure:
    return Figure(value=value, unit=unit, basis="computed", source=source)


def _step_section(deployment: Deployment) -> Section:
    rows = []
    for method in deployment.methods:
        basis, source = deployment.basis, deployment.source
        cost = method.cost
        values: dict[str, tuple[float, str]] = {}
        if isinstance(cost, FittedCost):
            values = _fitted_values(cost)
        elif isinstance(cost, ComputedCost):
            values = _computed_values(cost)
        figures = {}
        for column, (value, unit) in values.items():
            is_host = column in ("step", "a rule") and basis == "computed"
            figures[column] = _coefficient(deployment, value, unit, basis, source, is_host=is_host)
        figures["suffix"] = Figure(
            value=method.suffix_tokens, unit="tokens", basis="given", source="the recipe's prompt"
        )
        rows.append(FigureRow(label=method.label, figures=figures))
    note = "step, a rule: what each takes beside its tokens; pairs: a token and one it attends to."
    for method in deployment.methods:
        if isinstance(method.cost, FittedCost) and method.cost.indistinct:
            times = "; ".join(method.cost.indistinct)
            note += f" Not told from 0 by its standard error, {method.label}: {times}."
    return Section(title="coefficients", rows=tuple(rows), note=note)


def _coefficient(
    deployment: Deployment, value: float, unit: str, basis: Basis, source: str, *, is_host: bool
) -> Figure:
    """A coefficient as a figure. The host's part of a computed device was measured elsewhere."""
    if is_host and deployment.device is not None:
        basis, source = "measured elsewhere", deployment.device.host_source
    return Figure(value=value, unit=unit, basis=basis, source=source)


def _fitted_values(cost: FittedCost) -> dict[str, tuple[float, str]]:
    return {
        "step": (cost.step["steps"], "ms"),
        "1,000 tokens": (1000 * cost.step["tokens"], "ms"),
        "M pairs": (1e6 * cost.step["pairs"], "ms"),
        "a rule": (cost.step["sequences"], "ms"),
        "swap-in": (cost.swap_in_ms, "ms"),
        "disk": (cost.load_ms, "ms"),
        "wake": (cost.wake_ms, "ms"),
    }


def _computed_values(cost: ComputedCost) -> dict[str, tuple[float, str]]:
    from serve.plan.device.step_cost import StepWork

    return {
        "step": (cost.device.host_step_ms, "ms"),
        "1,000 tokens": (1000 * cost.compute_s(StepWork(tokens=1000)), "ms"),
        "M pairs": (1000 * cost.compute_s(StepWork(pairs=1e6)), "ms"),
        "a rule": (cost.device.host_rule_ms, "ms"),
        "swap-in": (1000 * cost.swap_s(StepWork(swap_ins=1)), "ms"),
        "disk": (1000 * cost.swap_s(StepWork(loads=1)), "ms"),
    }


def _memory_section(outcomes: list[Outcome]) -> Section:
    rows = []
    for outcome in outcomes:
        memory = outcome.method.memory
        counts: dict[str, tuple[float, str]] = {
            "weights": (memory.weights_bytes / GIB, "GiB"),
            "adapters": (memory.adapters_bytes / GIB, "GiB"),
            "keys and values": (memory.cache_bytes / GIB, "GiB"),
            "workspace": (memory.workspace_bytes / GIB, "GiB"),
            "slots": (memory.slots, ""),
            "cache": (memory.cache_tokens, "tokens"),
            "in host memory": (memory.host_adapters, "adapters"),
            "host": (memory.host_bytes / GIB, "GiB"),
        }
        figures = {}
        for column, (value, unit) in counts.items():
            figures[column] = _computed(value, unit, COUNTED)
        rows.append(FigureRow(label=outcome.method.label, figures=figures))
    return Section(title="memory", rows=tuple(rows))


def _replica_section(outcomes: list[Outcome]) -> Section:
    rows = []
    for outcome in outcomes:
        capacity = outcome.capacity
        figures = {
            "saturates at": _computed(capacity.saturation_per_second, "checks/s"),
            "lone p50": _computed(capacity.lone.p50_ms, "ms"),
            "lone p95": _computed(capacity.lone.p95_ms, "ms"),
        }
        point = capacity.within_target
        if point is not None:
            figures |= {
                "within target": _computed(point.rate, "checks/s"),
                "p50": _computed(point.p50_ms, "ms"),
                "p95": _computed(point.p95_ms, "ms"),
                "at work": _computed(100 * point.utilisation, "%"),
                "cache hits": _computed(100 * point.hit_rate, "% of tokens"),
            }
        rows.append(FigureRow(label=outcome.method.label, figures=figures))
    note = (
        "lone: at a fiftieth of saturation. within target: the greatest rate that keeps the p95 "
        "and leaves the replica some time."
    )
    return Section(title="one replica", rows=tuple(rows), note=note)


def _cost_section(deployment: Deployment, load: PlannedLoad, outcomes: list[Outcome]) -> Section:
    rows = []
    for outcome in outcomes:
        capacity = outcome.capacity
        price = deployment.price.value
        replicas = capacity.replicas(load.rate)
        full = per_million_checks(price, 1, capacity.saturation_per_second)
        figures = {"price": deployment.price}
        if replicas is not None:
            usd = per_million_checks(price, replicas, load.rate)
            figures |= {
                "replicas": _computed(replicas, ""),
                "a million checks": _computed(usd, "USD"),
                "a million verdicts": _computed(usd / load.rules, "USD"),
            }
        figures["checks, always full"] = _computed(full, "USD")
        rows.append(FigureRow(label=outcome.method.label, figures=figures))
    rows += _judge_rows(deployment.plan, load)
    note = (
        f"For {load.rate:g} checks/s of {load.tokens:,.0f} tokens and {load.rules:.1f} rules on "
        f"average, p95 within {deployment.plan.p95_ms:g} ms. No replicas: not even a lone check "
        "keeps it. always full: replicas that are never idle, whatever the latency. What is "
        "cheaper may judge worse."
    )
    if load.left_out:
        note += f" {load.left_out} lines of the trace have no verdict and were left out."
    return Section(title="cost", rows=tuple(rows), note=note)


def _judge_rows(plan: Plan, load: PlannedLoad) -> list[FigureRow]:
    if plan.judge is None:
        return []
    prices = judge_prices(plan.judge, load.tokens, load.rules)
    by_way = {
        f"{plan.judge.name}, a prompt a rule": prices.a_prompt_a_rule,
        "… conversation first, cached": prices.conversation_first,
        "… all rules in one prompt": prices.one_prompt,
    }
    rows = []
    source = f"tokens by prices: {plan.judge.source}"
    for label, usd in by_way.items():
        if usd is not None:
            figures = {
                "a million checks": _computed(usd, "USD", source),
                "a million verdicts": _computed(usd / load.rules, "USD", source),
            }
            rows.append(FigureRow(label=label, figures=figures))
    return rows


def _sharding_section(outcomes: list[Outcome]) -> Section:
    rows, sentences = [], []
    for outcome in outcomes:
        if outcome.sharding is None:
            continue
        label = outcome.method.label
        rows.append(_layout_row(f"{label}, swapping", outcome.sharding.swapping))
        rows.append(_layout_row(f"{label}, sharded", outcome.sharding.sharded))
        winner = "sharding" if outcome.sharding.shards_win else "one device that swaps"
        sentences.append(f"{label}: {winner} needs less time of devices.")
    note = " ".join(sentences)
    return Section(title="shards", rows=tuple(rows), note=note)


def _layout_row(label: str, layout: Layout) -> FigureRow:
    figures = {
        "devices": _computed(layout.shards, ""),
        "a check, all devices": _computed(layout.device_ms, "ms"),
        "p95": _computed(layout.p95_ms, "ms"),
        "swap-ins a check": _computed(layout.swap_ins, ""),
        "loads a check": _computed(layout.loads, ""),
    }
    return FigureRow(label=label, figures=figures)


def _curve(deployment: Deployment, outcomes: list[Outcome]) -> list[CurvePoint]:
    points = []
    for outcome in outcomes:
        for point in outcome.capacity.curve:
            usd = per_million_checks(deployment.price.value, 1, point.rate)
            points.append(
                CurvePoint(
                    method=outcome.method.name,
                    rate=point.rate,
                    p50_ms=point.p50_ms,
                    p95_ms=point.p95_ms,
                    utilisation=point.utilisation,
                    usd_per_million_checks=usd,
                )
            )
    return points
