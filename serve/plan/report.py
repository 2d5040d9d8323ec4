"""A plan's answer as tables in which every number says how it is known.

Every method is simulated and priced; an LLM judge is priced beside them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict
from guard.machine.provenance import provenance
from serve.engine.backends.arguments import GIB
from serve.plan.deployment import Deployment, PlannedMethod, deploy
from serve.plan.device import shown_ms
from serve.plan.plan_file import JudgePricing, Plan
from serve.plan.replica import Capacity, capacity
from serve.plan.traffic import TrafficSource, read_trace, trace_rate

COLUMNS = 110
SIMULATED = "simulated from the coefficients"
COUNTED = "counted from the base's shape and the recipe"
MILLION = 1e6
SECONDS_AN_HOUR = 3600
Basis = Literal["measured here", "computed", "given"]


class Figure(Strict):
    """A number with its unit, and how it is known: by which file, command or computation."""

    value: float
    unit: str
    basis: Basis
    source: str = ""

    @property
    def text(self) -> str:
        """The number with three digits and its mark, as tables show it: `41.2 c`."""
        number = f"{self.value:.3g}"
        if abs(self.value) >= 100:
            number = f"{self.value:,.0f}"
        return f"{number} {self.basis[0]}"


class Section(Strict):
    """A table: its figures by row and column. A column may be missing. `note`: sentences below."""

    title: str
    rows: dict[str, dict[str, Figure]]
    note: str = ""

    @property
    def text(self) -> str:
        """The section as lines: a column for each method or judge, a line for each figure."""
        import pandas as pd

        cells: dict[str, dict[str, str]] = {}
        for label, figures in self.rows.items():
            cells[label] = {}
            for column, figure in figures.items():
                cells[label][f"{column}, {figure.unit}".removesuffix(", ")] = figure.text
        frame = pd.DataFrame(list(cells.values()), index=list(cells)).fillna("").T
        lines = frame.rename_axis(columns=self.title).to_string(col_space=10)
        return "\n".join([lines, *textwrap.wrap(self.note, COLUMNS)])


class PlanReport(Strict):
    """Everything in `runs/plan.json`."""

    name: str
    commit: str
    hardware: str
    model: str
    source: str
    rate: float
    p95_target_ms: float
    sections: tuple[Section, ...]

    def rows(self, title: str) -> dict[str, dict[str, Figure]]:
        return {section.title: section.rows for section in self.sections}[title]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @property
    def text(self) -> str:
        lines = [f"{self.name}: {self.model} on {self.hardware}", ""]
        for section in self.sections:
            lines += [section.text, ""]
        marks = ", ".join(f"{basis[0]} {basis}" for basis in get_args(Basis))
        lines += textwrap.wrap(f"{marks}. Coefficients: {self.source}.", COLUMNS)
        return "\n".join(lines)


Outcomes = Sequence[tuple[PlannedMethod, Capacity]]


def build(plan: Plan, runs: Path) -> PlanReport:
    """Work out the plan. Raises GuardError where the plan is not possible."""
    plan, source = planned_traffic(plan, runs)
    deployment = deploy(plan, runs)
    outcomes = []
    for method in deployment.methods:
        outcomes.append((method, capacity(method, source, plan.p95_ms, plan.most_busy)))
    return PlanReport(
        name=plan.name,
        commit=provenance()["commit"],
        hardware=deployment.hardware,
        model=plan.model,
        source=deployment.source,
        rate=plan.traffic.rate,
        p95_target_ms=plan.p95_ms,
        sections=(
            _step_section(deployment),
            _memory_section(deployment),
            _replica_section(outcomes),
            _cost_section(plan, deployment, source, outcomes),
        ),
    )


def planned_traffic(plan: Plan, runs: Path) -> tuple[Plan, TrafficSource]:
    """The plan, with the rules and the rate of its trace if it has one, and its traffic."""
    if plan.traffic.trace is None:
        return plan, TrafficSource(plan.traffic, plan.checks, plan.seed)
    suffix = plan.suffix_tokens or deploy(plan, runs).methods[0].suffix_tokens
    trace = read_trace(Path(plan.traffic.trace), suffix)
    replaced: dict[str, float] = {"rules": max(len(trace.rules), plan.traffic.rules)}
    if "rate" not in plan.traffic.model_fields_set:
        replaced["rate"] = trace_rate(trace.arrivals)
    traffic = plan.traffic.model_copy(update=replaced)
    source = TrafficSource(traffic, plan.checks, plan.seed, trace.arrivals, trace.left_out)
    return plan.model_copy(update={"traffic": traffic}), source


def _figures(
    values: Mapping[str, tuple[float, str]], source: str, basis: Basis = "computed"
) -> dict[str, Figure]:
    """Figures, by column, of values with their units that are known in the same way."""
    figures = {}
    for column, (value, unit) in values.items():
        figures[column] = Figure(value=value, unit=unit, basis=basis, source=source)
    return figures


def _step_section(deployment: Deployment) -> Section:
    rows = {}
    basis: Basis = "measured here"
    if deployment.device is not None:
        basis = "computed"
    for method in deployment.methods:
        times_ms = shown_ms(method.cost.step_ms)
        if deployment.device is None:
            times_ms["wake"] = method.cost.wake_ms
        times = {column: (ms, "ms") for column, ms in times_ms.items()}
        suffix = {"suffix": (float(method.suffix_tokens), "tokens")}
        rows[method.label] = _figures(times, deployment.source, basis)
        rows[method.label] |= _figures(suffix, "the recipe's prompt", "given")
    note = "step, a rule: what each takes beside its tokens; pairs: a token and one it attends to."
    return Section(title="coefficients", rows=rows, note=note)


def _memory_section(deployment: Deployment) -> Section:
    rows = {}
    device = deployment.device
    for method in deployment.methods:
        sizes, bytes_of = method.sizes, method.bytes_of
        counts = {
            "weights": (bytes_of.weights / GIB, "GiB"),
            "adapters": (sizes.slots * bytes_of.adapter / GIB, "GiB"),
            "keys and values": (sizes.cache_tokens * bytes_of.token / GIB, "GiB"),
            "workspace": (0.0 if device is None else device.workspace_gib, "GiB"),
            "slots": (sizes.slots, ""),
            "cache": (sizes.cache_tokens, "tokens"),
            "in host memory": (sizes.host_adapters, "adapters"),
            "host": (sizes.host_adapters * bytes_of.host_adapter / GIB, "GiB"),
        }
        rows[method.label] = _figures(counts, COUNTED)
    return Section(title="memory", rows=rows)


def _replica_section(outcomes: Outcomes) -> Section:
    rows = {}
    for method, limits in outcomes:
        values = {
            "saturates at": (limits.saturation_per_second, "checks/s"),
            "lone p50": (limits.lone.p50_ms, "ms"),
            "lone p95": (limits.lone.p95_ms, "ms"),
        }
        replay = limits.within_target
        if replay is not None and limits.rate is not None:
            checks = len(replay.latencies_s)
            values |= {
                "within target": (limits.rate, "checks/s"),
                "p50": (replay.p50_ms, "ms"),
                "p95": (replay.p95_ms, "ms"),
                "at work": (100 * replay.utilisation, "%"),
                "cache hits": (100 * replay.hit_rate, "% of tokens"),
                "swap-ins": (replay.work.swap_ins / checks, "a check"),
                "reads": (replay.work.loads / checks, "a check"),
            }
        rows[method.label] = _figures(values, SIMULATED)
    note = (
        "lone: at a fiftieth of saturation. within target: the greatest rate that keeps the p95 "
        "and leaves the replica some time."
    )
    return Section(title="one replica", rows=rows, note=note)


def _cost_section(
    plan: Plan, deployment: Deployment, source: TrafficSource, outcomes: Outcomes
) -> Section:
    rate, an_hour = plan.traffic.rate, deployment.price_an_hour
    arrivals = source.at(rate).arrivals
    rules = float(np.mean([len(arrival.rules) for arrival in arrivals]))
    tokens = float(np.mean([arrival.tokens for arrival in arrivals]))
    price = _figures({"price": (an_hour, "USD an hour")}, deployment.price_source, "given")
    rows = {}
    for method, limits in outcomes:
        replicas = limits.replicas(rate)
        values: dict[str, tuple[float, str]] = {}
        if replicas is not None:
            values["replicas"] = (replicas, "")
            values |= _prices(per_million_checks(an_hour, replicas, rate), rules)
        full = per_million_checks(an_hour, 1, limits.saturation_per_second)
        values["checks, always full"] = (full, "USD")
        rows[method.label] = price | _figures(values, SIMULATED)
    if plan.judge is not None:
        origin = f"tokens by prices: {plan.judge.source}"
        for label, usd in judge_prices(plan.judge, tokens, rules).items():
            rows[label] = _figures(_prices(usd, rules), origin)
    note = (
        f"For {rate:g} checks/s of {tokens:,.0f} tokens and {rules:.1f} rules on average, p95 "
        f"within {plan.p95_ms:g} ms. No replicas: not even a lone check keeps it. always full: "
        "replicas that are never idle, whatever the latency. What is cheaper may judge worse."
    )
    if source.left_out:
        note += f" {source.left_out} lines of the trace have no verdict and were left out."
    return Section(title="cost", rows=rows, note=note)


def _prices(usd: float, rules: float) -> dict[str, tuple[float, str]]:
    return {"a million checks": (usd, "USD"), "a million verdicts": (usd / rules, "USD")}


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
