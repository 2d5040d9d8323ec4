"""Plans whose coefficients are written down instead of measured. Tests only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from guard.files.yaml_file import validate
from serve.plan.device.calibration import (
    FEATURES,
    SUBMIT_FEATURES,
    DeviceCalibration,
    EngineSizes,
    FittedCost,
)
from serve.plan.plan_file import Plan

# Ten checks of 100 tokens and a rule fill a second.
STEP = dict.fromkeys(FEATURES, 0.0) | {"tokens": 1.0}
SUBMIT = dict.fromkeys(SUBMIT_FEATURES, 0.0)


def calibrated(runs: Path, *, commit: str = "c0ffee", suffix: int = 3, load_ms: float = 0) -> Path:
    """Write a calibration of the tiny base: a millisecond a token, nothing else."""
    costs = {}
    for method in ("alora", "lora"):
        costs[method] = FittedCost(step=STEP, submit=SUBMIT, swap_in_ms=4.0, load_ms=load_ms)
    calibration = DeviceCalibration(
        commit=commit,
        hardware="a core of a test",
        versions={},
        model="tiny",
        peak_memory_mib=1.0,
        engine=EngineSizes(
            step_tokens=2048,
            max_sequences=512,
            block_size=32,
            cache_tokens=100_000,
            scaffold_tokens=0,
            suffix_tokens=suffix,
        ),
        methods=costs,
        bursts=(),
    )
    runs.mkdir(parents=True, exist_ok=True)
    path = runs / "calibration.json"
    path.write_text(calibration.model_dump_json(), encoding="utf-8")
    return path


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
