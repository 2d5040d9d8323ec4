"""`python -m serve.plan.run --plan tiny_here`, entry of `make plan`: what a deployment costs.

Checks a second, latencies with queueing, memory, replicas, dollars.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pandas as pd

from guard.errors import exits_cleanly
from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict
from guard.home import HOME, own_or_shipped
from guard.layout import Runs
from guard.machine.provenance import provenance
from guard.method import METHODS
from serve.engine.backends.arguments import GIB
from serve.plan.calibration import DeviceCalibration, load_calibration
from serve.plan.plan_file import Plan, load_plan
from serve.plan.replica import IDLE, PlannedMethod, deploy, traffic_kinds

PER_MILLION = 1e6 / 3600  # USD for what comes once a second, at a dollar an hour


class PlanReport(Strict):
    """Everything in `runs/plan.json`. `figures`: of each method, by name and unit, some of them."""

    plan: Plan
    commit: str
    calibration: DeviceCalibration
    figures: dict[str, dict[str, float]]

    @property
    def text(self) -> str:
        """A column for each method, a line for each figure."""
        frame = pd.DataFrame(self.figures, dtype=float)
        table = frame.to_string(col_space=8, float_format=_in_digits, na_rep="")
        title = f"{self.plan.name}: {self.plan.model} on {self.calibration.hardware}, by M/G/1 from"
        return f"{title} {self.calibration.source}\n\n{table}"


def _in_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def build(plan: Plan, runs: Path) -> PlanReport:
    """Work out the plan. Raises GuardError where it is not possible."""
    path = runs / "calibration.json"
    if plan.calibration is not None:
        path = own_or_shipped(HOME / plan.calibration)
    calibration = load_calibration(path)
    methods = deploy(plan.of_group, calibration)
    figures = {METHODS[method.name].label: _values(method) for method in methods}
    if plan.judge_price is not None:
        tokens, _, _ = traffic_kinds(plan.traffic)
        usd = plan.judge_price * float(tokens.mean()) * plan.traffic.mean_rules
        figures["LLM, a call a rule"] = _priced(usd, plan)
    commit = provenance()["commit"]
    return PlanReport(plan=plan, commit=commit, calibration=calibration, figures=figures)


def _values(method: PlannedMethod) -> dict[str, float]:
    """The figures of a replica, and of the deployment where its checks keep the target. The method
    is planned for one group of the rules.
    """
    plan, bytes_of, lone = method.plan, method.bytes_of, method.at(IDLE)
    values = {
        "weights, GiB": bytes_of.weights / GIB,
        "adapters, GiB": method.slots * bytes_of.adapter / GIB,
        "keys and values, GiB": method.cache_tokens * bytes_of.token / GIB,
        "slots": method.slots,
        "cache, tokens": method.cache_tokens,
        "host, GiB": plan.traffic.rules * bytes_of.host_adapter / GIB,
        "saturates at, checks/s": method.saturation,
        "a full step, ms": lone.step_ms,
        "lone p50, ms": lone.latency_ms(0.5),
        "lone p95, ms": lone.latency_ms(0.95),
        "swap-ins, a check": method.swap_ins,
        "1M checks, always full, USD": plan.price_an_hour / method.saturation * PER_MILLION,
    }
    if method.greatest_rate is None:
        return values
    replicas = math.ceil(plan.traffic.rate / method.greatest_rate - 1e-9)
    load = method.at(plan.traffic.rate / replicas)
    values["within target, checks/s"] = method.greatest_rate
    values["replicas"] = plan.traffic.groups * replicas
    values |= {f"p{share}, ms": load.latency_ms(share / 100) for share in (50, 95, 99)}
    values["utilisation, %"] = 100 * load.utilisation
    values["cache hits, % of tokens"] = 100 * load.hit_rate
    return values | _priced(plan.price_an_hour * replicas / plan.traffic.rate * PER_MILLION, plan)


def _priced(usd: float, plan: Plan) -> dict[str, float]:
    return {"1M checks, USD": usd, "1M verdicts, USD": usd / plan.traffic.mean_rules}


@exits_cleanly
def main() -> None:
    """Plan, write the report, print the table."""
    parser = argparse.ArgumentParser(prog="python -m serve.plan.run", description=__doc__)
    parser.add_argument("--plan", default="tiny_here", help="of recipes/plans, or a YAML file")
    parser.add_argument("--runs", type=Path, default=Runs().root, help="where results go")
    arguments = parser.parse_args()
    report, path = build(load_plan(arguments.plan), arguments.runs), arguments.runs / "plan.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part:
        part.write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    print(report.text)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
