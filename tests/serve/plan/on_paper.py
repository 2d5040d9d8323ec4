"""Plans and calibrations small enough to reckon by hand. Tests only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from guard.files.yaml_file import validate
from serve.plan.calibration import DeviceCalibration, FittedCost
from serve.plan.plan_file import Plan


def linear(*, swap_in_ms: float = 0.0, **step: float) -> FittedCost:
    """Times with these coefficients of a step and for an adapter; all others are 0."""
    return FittedCost(
        step=dict.fromkeys(("steps", "tokens", "pairs", "sequences"), 0.0) | step,
        submit=dict.fromkeys(("checks", "conversation_tokens", "rules"), 0.0),
        swap_in_ms=swap_in_ms,
    )


def calibration(cost: FittedCost) -> DeviceCalibration:
    """A calibration of the tiny base: these costs by either method."""
    return DeviceCalibration(
        commit="c0ffee",
        hardware="a core of a test",
        model="tiny",
        scaffold_tokens=0,
        suffix_tokens=3,
        methods={"alora": cost, "lora": cost},
    )


# A millisecond a token, so that 100 tokens ten times fill a second.
CALIBRATION = calibration(linear(tokens=1.0, swap_in_ms=4.0))


def calibrated(runs: Path) -> None:
    (runs / "calibration.json").write_text(CALIBRATION.model_dump_json(), encoding="utf-8")


def plan(**replaced: Any) -> Plan:
    """Conversations of 97 tokens and a rule each, on this machine at 3.6 dollars an hour."""
    content: dict[str, Any] = {
        "name": "small",
        "price_an_hour": 3.6,
        "p95_ms": 400.0,
        "traffic": {"rate": 20.0, "lengths": [97, 97], "rules_a_check": [1, 1], "rules": 1},
    }
    return validate(content | replaced, Plan, where="a test's plan")
