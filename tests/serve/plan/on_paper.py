"""Replicas, traffic and plans small enough to reckon by hand. Tests only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from guard.files.yaml_file import validate
from serve.plan.batching import ReplicaSizes
from serve.plan.calibration import FEATURES, SUBMIT_FEATURES, DeviceCalibration, FittedCost
from serve.plan.plan_file import Plan
from serve.plan.report import PlanReport
from serve.plan.traffic import CheckArrival


def sizes(**replaced: int) -> ReplicaSizes:
    """Steps of 100 tokens, 50 sequences and 50 adapters; a cache of all, in blocks of a token."""
    fields = {"step_tokens": 100, "max_sequences": 50, "slots": 50, "block_size": 1}
    fields |= {"cache_tokens": 10**9, "adapters": 50}
    return ReplicaSizes(**(fields | replaced))


def check(due_s: float, tokens: int, rules: int = 1, session: int = 0) -> CheckArrival:
    return CheckArrival(due_s, session, tokens, tuple(range(rules)))


def linear(*, swap_in_ms: float = 0.0, **step: float) -> FittedCost:
    """Times with these coefficients of FEATURES and for an adapter; all others are 0."""
    return FittedCost(
        step=dict.fromkeys(FEATURES, 0.0) | step,
        submit=dict.fromkeys(SUBMIT_FEATURES, 0.0),
        swap_in_ms=swap_in_ms,
    )


def calibration(**costs: FittedCost) -> DeviceCalibration:
    """A calibration of the tiny base with these costs by method."""
    return DeviceCalibration(
        commit="c0ffee",
        hardware="a core of a test",
        versions={},
        model="tiny",
        peak_memory_mib=1.0,
        scaffold_tokens=0,
        suffix_tokens=3,
        methods=costs,
        bursts=(),
    )


COST = linear(tokens=1.0, swap_in_ms=4.0)
# A millisecond a token, so that 100 tokens ten times fill a second.
CALIBRATION = calibration(alora=COST, lora=COST)


def calibrated(runs: Path) -> None:
    (runs / "calibration.json").write_text(CALIBRATION.model_dump_json(), encoding="utf-8")


def plan(**replaced: Any) -> Plan:
    """Conversations of 97 tokens and a rule each, on this machine at a dollar an hour."""
    content: dict[str, Any] = {
        "name": "small",
        "price_an_hour": 3.6,
        "p95_ms": 400.0,
        "checks": 400,
        "traffic": {"rate": 20.0, "lengths": [97, 97], "rules_a_check": [1, 1], "rules": 1},
    }
    return validate(content | replaced, Plan, where="a test's plan")


def figures(report: PlanReport, title: str) -> dict[str, dict[str, float]]:
    return {section.title: section.figures for section in report.sections}[title]
