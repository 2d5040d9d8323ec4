from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from guard.errors import GuardError
from serve.plan.calibration import (
    FEATURES,
    BurstRow,
    FittedCost,
    fitted,
    load_calibration,
    non_negative,
)
from serve.plan.device import StepWork
from tests.serve.plan.on_paper import calibration

STEP = {"steps": 9.0, "tokens": 0.035, "pairs": 2e-5, "sequences": 0.3}
SUBMIT = {"checks": 0.3, "conversation_tokens": 0.002, "rules": 0.03}
FITTED = FittedCost(step=STEP, submit=SUBMIT)


def burst(draw: np.random.Generator, noise: float) -> BurstRow:
    work = {
        "steps": int(draw.integers(1, 5)),
        "tokens": int(draw.integers(100, 8000)),
        "pairs": float(draw.uniform(1e4, 2e7)),
        "sequences": int(draw.integers(1, 200)),
    }
    checks, tokens, rules = (int(draw.integers(1, most)) for most in (8, 8000, 200))
    submit_noise, steps_noise = draw.uniform(1 - noise, 1 + noise, 2)
    return BurstRow(
        method="alora",
        checks=checks,
        conversation_tokens=tokens,
        rules=rules,
        submit_ms=np.dot([*SUBMIT.values()], [checks, tokens, rules]) * submit_noise,
        steps_ms=sum(STEP[name] * work[name] for name in FEATURES) * steps_noise,
        steps=work["steps"],
        work=work,
    )


def test_coefficients_are_found_again_in_bursts_with_noise() -> None:
    draw = np.random.default_rng(0)
    exact = fitted([burst(draw, 0.0) for _ in range(40)])
    assert exact.step == pytest.approx(STEP) and exact.submit == pytest.approx(SUBMIT)
    assert exact.error == pytest.approx(0, abs=1e-9)
    noisy = fitted([burst(draw, 0.1) for _ in range(400)])
    assert noisy.step == pytest.approx(STEP, rel=0.2)
    assert 0.03 < noisy.error < 0.08


def test_times_that_a_machine_sometimes_doubles_are_predicted_in_the_mean() -> None:
    draw = np.random.default_rng(0)
    counts = draw.uniform(1, 10, size=(2000, 2))
    times = counts @ [3.0, 5.0] * np.where(draw.uniform(size=2000) < 0.2, 2.0, 1.0)
    predicted = counts @ non_negative(counts, list(times))
    assert np.mean(times / predicted) == pytest.approx(1, abs=0.02)
    falling = non_negative([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], [3.0, 2.0, 1.0])
    assert min(falling) >= 0


def test_a_step_and_its_copies_and_a_submission_add_up() -> None:
    cost = FittedCost(step=STEP, submit=SUBMIT, swap_in_ms=2.0, load_ms=5.0)
    work = StepWork(steps=1, tokens=100, pairs=1e5, sequences=10, swap_ins=2, loads=1)
    assert cost.step_ms(work) == pytest.approx(9 + 3.5 + 2 + 3 + 4 + 5)
    assert cost.submit_ms(1000, 10) == pytest.approx(0.3 + 2 + 0.3)


def test_the_file_is_read_as_it_was_written_and_another_is_refused(tmp_path: Path) -> None:
    path, written = tmp_path / "calibration.json", calibration(alora=FITTED)
    with pytest.raises(GuardError, match=r"calibration.json.*make bench NAME=calibrate"):
        load_calibration(path)
    path.write_text(written.model_dump_json(), encoding="utf-8")
    assert load_calibration(path) == written
    with pytest.raises(GuardError, match=r"no such method.*got lora.*Known: alora"):
        written.cost("lora")
    for broken in ("{", '{"commit": 1}'):
        path.write_text(broken, encoding="utf-8")
        with pytest.raises(GuardError, match=r"calibration\.json"):
            load_calibration(path)
