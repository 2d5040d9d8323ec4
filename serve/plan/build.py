"""Turns a plan into its report: simulates and prices every method, says how numbers are known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from guard.machine.provenance import provenance
from serve.engine.backends.arguments import GIB
from serve.plan.capacity import Capacity, TrafficSource, capacity, trace_rate
from serve.plan.deployment import Deployment, PlannedMethod, deploy
from serve.plan.device.accelerator import ComputedCost
from serve.plan.device.calibration import FittedCost
from serve.plan.device.step_cost import StepWork
from serve.plan.plan_file import JudgePricing, Plan
from serve.plan.report import CurvePoint, Figure, FigureRow, PlanReport, Section, computed
from serve.plan.trace import read_trace
from serve.plan.traffic import TrafficShape

SIMULATED = "simulated from the coefficients"
COUNTED = "counted from the base's shape and the recipe"
MILLION = 1e6
SECONDS_AN_HOUR = 3600


@dataclass(frozen=True)
class Outcome:
    """What the simulation says of a method."""

    method: PlannedMethod
    capacity: Capacity


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
    outcomes = []
    for method in deployment.methods:
        limits = capacity(method, load.source, plan.p95_ms, plan.most_busy)
        outcomes.append(Outcome(method, limits))
    return PlanReport(
        name=plan.name,
        commit=provenance()["commit"],
        hardware=deployment.hardware,
        model=plan.model,
        source=deployment.source,
        rate=load.rate,
        p95_target_ms=plan.p95_ms,
        sections=(
            _step_section(deployment),
            _memory_section(outcomes),
            _replica_section(outcomes),
            _cost_section(deployment, load, outcomes),
        ),
        curve=tuple(_curve(deployment, outcomes)),
    )


def planned_load(plan: Plan, runs: Path) -> tuple[Plan, PlannedLoad]:
    """The plan, with the rules and the rate of its trace if it has one, and its traffic."""
    traffic, trace = plan.traffic, None
    if traffic.trace is not None:
        suffix = plan.suffix_tokens or deploy(plan, runs).methods[0].suffix_tokens
        trace = read_trace(Path(traffic.trace), suffix)
        replaced: dict[str, float] = {"rules": max(len(trace.rules), traffic.rules)}
        if "rate" not in traffic.model_fields_set:
            replaced["rate"] = trace_rate(trace.arrivals)
        traffic = traffic.model_copy(update=replaced)
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
    return plan, PlannedLoad(
        source=source,
        rate=traffic.rate,
        rules=float(np.mean([len(arrival.rules) for arrival in arrivals])),
        tokens=float(np.mean([arrival.tokens for arrival in arrivals])),
        left_out=trace.left_out if trace is not None else 0,
    )


def _step_section(deployment: Deployment) -> Section:
    rows = []
    note = "step, a rule: what each takes beside its tokens; pairs: a token and one it attends to."
    for method in deployment.methods:
        figures = {}
        for column, (value, unit) in _coefficients(method.cost).items():
            basis, source = deployment.basis, deployment.source
            if column in ("step", "a rule") and deployment.device is not None:
                # The host's part of a computed device was measured on another one.
                basis, source = "measured elsewhere", deployment.device.host_source
            figures[column] = Figure(value=value, unit=unit, basis=basis, source=source)
        figures["suffix"] = Figure(
            value=method.suffix_tokens, unit="tokens", basis="given", source="the recipe's prompt"
        )
        rows.append(FigureRow(label=method.label, figures=figures))
        if isinstance(method.cost, FittedCost) and method.cost.indistinct:
            times = "; ".join(method.cost.indistinct)
            note += f" Not told from 0 by its standard error, {method.label}: {times}."
    return Section(title="coefficients", rows=tuple(rows), note=note)


def _coefficients(cost: FittedCost | ComputedCost) -> dict[str, tuple[float, str]]:
    if isinstance(cost, FittedCost):
        return {
            "step": (cost.step["steps"], "ms"),
            "1,000 tokens": (1000 * cost.step["tokens"], "ms"),
            "M pairs": (MILLION * cost.step["pairs"], "ms"),
            "a rule": (cost.step["sequences"], "ms"),
            "swap-in": (cost.swap_in_ms, "ms"),
            "disk": (cost.load_ms, "ms"),
            "wake": (cost.wake_ms, "ms"),
        }
    return {
        "step": (cost.device.host_step_ms, "ms"),
        "1,000 tokens": (1000 * cost.compute_s(StepWork(tokens=1000)), "ms"),
        "M pairs": (1000 * cost.compute_s(StepWork(pairs=MILLION)), "ms"),
        "a rule": (cost.device.host_rule_ms, "ms"),
        "swap-in": (1000 * cost.swap_s(StepWork(swap_ins=1)), "ms"),
        "disk": (1000 * cost.swap_s(StepWork(loads=1)), "ms"),
    }


def _memory_section(outcomes: list[Outcome]) -> Section:
    rows = []
    for outcome in outcomes:
        memory = outcome.method.memory
        counts = {
            "weights": (memory.weights_bytes / GIB, "GiB"),
            "adapters": (memory.adapters_bytes / GIB, "GiB"),
            "keys and values": (memory.cache_bytes / GIB, "GiB"),
            "workspace": (memory.workspace_bytes / GIB, "GiB"),
            "slots": (memory.slots, ""),
            "cache": (memory.cache_tokens, "tokens"),
            "in host memory": (memory.host_adapters, "adapters"),
            "host": (memory.host_bytes / GIB, "GiB"),
        }
        rows.append(FigureRow(label=outcome.method.label, figures=computed(counts, COUNTED)))
    return Section(title="memory", rows=tuple(rows))


def _replica_section(outcomes: list[Outcome]) -> Section:
    rows = []
    for outcome in outcomes:
        limits = outcome.capacity
        values = {
            "saturates at": (limits.saturation_per_second, "checks/s"),
            "lone p50": (limits.lone.p50_ms, "ms"),
            "lone p95": (limits.lone.p95_ms, "ms"),
        }
        point = limits.within_target
        if point is not None:
            values |= {
                "within target": (point.rate, "checks/s"),
                "p50": (point.p50_ms, "ms"),
                "p95": (point.p95_ms, "ms"),
                "at work": (100 * point.utilisation, "%"),
                "cache hits": (100 * point.hit_rate, "% of tokens"),
                "swap-ins": (point.swap_ins, "a check"),
                "reads": (point.loads, "a check"),
            }
        rows.append(FigureRow(label=outcome.method.label, figures=computed(values, SIMULATED)))
    note = (
        "lone: at a fiftieth of saturation. within target: the greatest rate that keeps the p95 "
        "and leaves the replica some time."
    )
    return Section(title="one replica", rows=tuple(rows), note=note)


def _cost_section(deployment: Deployment, load: PlannedLoad, outcomes: list[Outcome]) -> Section:
    rows = []
    for outcome in outcomes:
        limits, price = outcome.capacity, deployment.price.value
        replicas = limits.replicas(load.rate)
        values: dict[str, tuple[float, str]] = {}
        if replicas is not None:
            usd = per_million_checks(price, replicas, load.rate)
            values["replicas"] = (replicas, "")
            values |= _checks_and_verdicts(usd, load)
        full = per_million_checks(price, 1, limits.saturation_per_second)
        values["checks, always full"] = (full, "USD")
        figures = {"price": deployment.price} | computed(values, SIMULATED)
        rows.append(FigureRow(label=outcome.method.label, figures=figures))
    judge = deployment.plan.judge
    if judge is not None:
        source = f"tokens by prices: {judge.source}"
        for label, usd in judge_prices(judge, load.tokens, load.rules).items():
            figures = computed(_checks_and_verdicts(usd, load), source)
            rows.append(FigureRow(label=label, figures=figures))
    note = (
        f"For {load.rate:g} checks/s of {load.tokens:,.0f} tokens and {load.rules:.1f} rules on "
        f"average, p95 within {deployment.plan.p95_ms:g} ms. No replicas: not even a lone check "
        "keeps it. always full: replicas that are never idle, whatever the latency. What is "
        "cheaper may judge worse."
    )
    if load.left_out:
        note += f" {load.left_out} lines of the trace have no verdict and were left out."
    return Section(title="cost", rows=tuple(rows), note=note)


def _checks_and_verdicts(usd: float, load: PlannedLoad) -> dict[str, tuple[float, str]]:
    return {"a million checks": (usd, "USD"), "a million verdicts": (usd / load.rules, "USD")}


def per_million_checks(price_an_hour: float, devices: float, checks_per_second: float) -> float:
    """The cost in USD of a million checks by a deployment that runs all the time."""
    return price_an_hour * devices / (checks_per_second * SECONDS_AN_HOUR) * MILLION


def judge_prices(judge: JudgePricing, tokens: float, rules: float) -> dict[str, float]:
    """The costs in USD of a million checks by an LLM judge, by the way in which it is asked.

    For conversations of `tokens` tokens that are put to `rules` rules on average; the two numbers
    are taken as independent. With the conversation first, all prompts of a check but one read it
    from the provider's cache: left out where `cached_input` has no price.
    """
    prompt = judge.scaffold_tokens + tokens
    answers = rules * judge.output_tokens * judge.output
    policies = rules * judge.policy_tokens * judge.input
    prices = {f"{judge.name}, a prompt a rule": rules * prompt * judge.input + policies + answers}
    if judge.cached_input is not None:
        read_again = (rules - 1) * prompt * judge.cached_input
        cached = prompt * judge.input + read_again + policies + answers
        prices["… conversation first, cached"] = cached
    prices["… all rules in one prompt"] = prompt * judge.input + policies + answers
    return prices


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
