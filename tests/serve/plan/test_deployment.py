"""What a plan deploys: costs fitted to what was measured, sizes as the engine's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pytest import MonkeyPatch

from guard.errors import GuardError
from guard.recipe import ServingMemory, load_recipe
from serve.engine.backends.arguments import GIB, engine_args
from serve.engine.thread.engine_thread import MAX_OPEN
from serve.plan.batching import StepWork
from serve.plan.calibration import (
    FEATURES,
    BurstRow,
    FittedCost,
    fitted,
    load_calibration,
    non_negative,
)
from serve.plan.deployment import PlannedMethod, deploy
from tests.serve.plan.on_paper import CALIBRATION, calibration, plan


def slots_bytes(method: PlannedMethod) -> int:
    return method.sizes.slots * method.bytes_of.adapter


def test_methods_are_planned_with_what_was_measured_of_them() -> None:
    alora, lora = deploy(plan(), CALIBRATION)
    assert (alora.shares, lora.shares) == (True, False)
    assert alora.cost == CALIBRATION.methods["alora"] and alora.suffix_tokens == 3
    assert alora.sizes.step_tokens == 2048 and alora.sizes.max_open == MAX_OPEN
    assert slots_bytes(lora) > slots_bytes(alora)


def test_memory_is_split_as_the_engine_splits_it() -> None:
    recipe = load_recipe("tiny")
    planned = deploy(plan(slots=7), CALIBRATION)[0]
    targets = recipe.settings("alora").lora["target_modules"]
    args = engine_args(recipe, [], {"max_loras": 7, "lora_target_modules": targets})
    assert planned.sizes.slots == args["max_loras"]
    cache_bytes = args["kv_cache_memory_bytes"]
    assert planned.sizes.cache_tokens == cache_bytes // planned.bytes_of.token


def test_the_memory_that_is_stated_holds_the_weights_too() -> None:
    method = deploy(plan(memory_gib=2.0), CALIBRATION)[0]
    bytes_of = method.bytes_of
    parts_bytes = bytes_of.weights + slots_bytes(method)
    parts_bytes += method.sizes.cache_tokens * bytes_of.token
    assert 0 <= 2 * GIB - parts_bytes <= bytes_of.token


@pytest.mark.parametrize(
    ("replaced", "words"),
    [
        ({"memory_gib": 0.001}, "the base does not fit.*got 0.001 GiB"),
        ({"model": "qwen3-0.6b"}, "calibration is of another model.*got tiny"),
        ({"model": "minilm"}, "only decoders"),
        ({"slots": 10**9}, "does not hold"),
    ],
)
def test_what_does_not_go_together_is_refused(replaced: dict[str, object], words: str) -> None:
    with pytest.raises(GuardError, match=words):
        deploy(plan(**replaced), CALIBRATION)


def test_without_a_figure_of_memory_nothing_is_guessed(monkeypatch: MonkeyPatch) -> None:
    recipe = load_recipe("tiny").model_copy(update={"serving_memory": ServingMemory()})
    monkeypatch.setattr("serve.plan.deployment.load_recipe", lambda name: recipe)
    with pytest.raises(GuardError, match="State `memory_gib`"):
        deploy(plan(), CALIBRATION)


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
    assert min(non_negative([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], [3.0, 2.0, 1.0])) >= 0


def test_a_step_and_its_copies_and_a_submission_add_up() -> None:
    cost = FittedCost(step=STEP, submit=SUBMIT, swap_in_ms=2.0)
    work = StepWork(steps=1, tokens=100, pairs=1e5, sequences=10, swap_ins=2)
    assert cost.step_ms(work) == pytest.approx(9 + 3.5 + 2 + 3 + 4)
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
