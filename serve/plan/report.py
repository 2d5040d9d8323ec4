"""A plan's answer as tables: every method is simulated and priced."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from guard.errors import GuardError
from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict
from guard.machine.provenance import provenance
from serve.engine.backends.arguments import GIB
from serve.plan.calibration import load_calibration
from serve.plan.deployment import PlannedMethod, deploy
from serve.plan.plan_file import Plan
from serve.plan.replica import Capacity, capacity
from serve.plan.traffic import draw_traffic

COLUMNS = 110
MILLION = 1e6
SECONDS_AN_HOUR = 3600


class Section(Strict):
    """A table: of each method its figures, by name and unit. Some may be missing."""

    title: str
    figures: dict[str, dict[str, float]]
    note: str  # where they come from

    @property
    def text(self) -> str:
        """The section as lines: a column for each method, a line for each figure."""
        import pandas as pd

        frame = pd.DataFrame(self.figures, dtype=float).rename_axis(columns=self.title)
        lines = frame.to_string(col_space=8, float_format=_in_digits, na_rep="")
        return "\n".join([lines, *textwrap.wrap(self.note, COLUMNS)])


def _in_digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


class PlanReport(Strict):
    """Everything in `runs/plan.json`."""

    name: str
    commit: str
    hardware: str
    model: str
    rate: float
    p95_target_ms: float
    sections: tuple[Section, ...]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @property
    def text(self) -> str:
        tables = [section.text for section in self.sections]
        return "\n\n".join([f"{self.name}: {self.model} on {self.hardware}", *tables])


Outcomes = Sequence[tuple[PlannedMethod, Capacity]]


def build(plan: Plan, runs: Path) -> PlanReport:
    """Work out the plan. Raises GuardError where the plan is not possible."""
    an_hour = plan.price_an_hour
    if an_hour is None:
        remedy = "State `price_an_hour` in the plan"
        raise GuardError("what this machine costs is not known", got=plan.name, remedy=remedy)
    calibration = load_calibration(runs / "calibration.json")
    methods = deploy(plan, calibration)
    outcomes = [(method, capacity(method, plan)) for method in methods]
    return PlanReport(
        name=plan.name,
        commit=provenance()["commit"],
        hardware=calibration.hardware,
        model=plan.model,
        rate=plan.traffic.rate,
        p95_target_ms=plan.p95_ms,
        sections=(
            _memory_section(methods),
            _replica_section(outcomes, calibration.commit),
            _cost_section(plan, an_hour, outcomes),
        ),
    )


def _memory_section(methods: Sequence[PlannedMethod]) -> Section:
    figures = {}
    for method in methods:
        sizes, bytes_of = method.sizes, method.bytes_of
        figures[method.label] = {
            "weights, GiB": bytes_of.weights / GIB,
            "adapters, GiB": sizes.slots * bytes_of.adapter / GIB,
            "keys and values, GiB": sizes.cache_tokens * bytes_of.token / GIB,
            "slots": sizes.slots,
            "cache, tokens": sizes.cache_tokens,
            "host, GiB": sizes.adapters * bytes_of.host_adapter / GIB,
        }
    note = "Counted from the base's architecture and the recipe."
    return Section(title="memory", figures=figures, note=note)


def _replica_section(outcomes: Outcomes, calibrated_at: str) -> Section:
    figures = {}
    for method, limits in outcomes:
        values = {
            "saturates at, checks/s": limits.saturation_per_second,
            "lone p50, ms": limits.lone.p50_ms,
            "lone p95, ms": limits.lone.p95_ms,
        }
        replay = limits.within_target
        if replay is not None and limits.rate is not None:
            checks = len(replay.latencies_s)
            values |= {
                "within target, checks/s": limits.rate,
                "p50, ms": replay.p50_ms,
                "p95, ms": replay.p95_ms,
                "at work, %": 100 * replay.utilisation,
                "cache hits, % of tokens": 100 * replay.hit_rate,
                "swap-ins, a check": replay.work.swap_ins / checks,
            }
        figures[method.label] = values
    note = (
        f"Simulated from the calibration of commit {calibrated_at}. lone: at a fiftieth of "
        "saturation. within target: the greatest rate that keeps the p95 and leaves the replica "
        "some time."
    )
    return Section(title="one replica", figures=figures, note=note)


def _cost_section(plan: Plan, an_hour: float, outcomes: Outcomes) -> Section:
    rate = plan.traffic.rate
    arrivals = draw_traffic(plan, rate).arrivals
    rules = float(np.mean([len(arrival.rules) for arrival in arrivals]))
    tokens = float(np.mean([arrival.tokens for arrival in arrivals]))
    figures = {}
    for method, limits in outcomes:
        values = {"price, USD an hour": an_hour}
        replicas = limits.replicas(rate)
        if replicas is not None:
            values["replicas"] = replicas
            usd = per_million_checks(an_hour, replicas, rate)
            values |= {"a million checks, USD": usd, "a million verdicts, USD": usd / rules}
        full = per_million_checks(an_hour, 1, limits.saturation_per_second)
        values["checks, always full, USD"] = full
        figures[method.label] = values
    note = f"For {rate:g} checks/s of {tokens:,.0f} tokens and {rules:.1f} rules on average, p95 "
    note += f"within {plan.p95_ms:g} ms. No replicas: not even a lone check keeps it. always full: "
    note += "replicas that are never idle, whatever the latency. What is cheaper may judge worse."
    return Section(title="cost", figures=figures, note=note)


def per_million_checks(price_an_hour: float, devices: float, checks_per_second: float) -> float:
    """The cost in USD of a million checks by a deployment that runs all the time."""
    return price_an_hour * devices / (checks_per_second * SECONDS_AN_HOUR) * MILLION
