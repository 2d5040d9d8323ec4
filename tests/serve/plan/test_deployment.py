"""What a plan deploys: measured costs fitted, a device's by the roofline, sizes as the engine's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from guard.errors import GuardError
from guard.recipe import ServingMemory, load_recipe
from serve.engine.backends import arguments
from serve.engine.backends.arguments import GIB, engine_args, sizes_of
from serve.engine.thread.engine_thread import MAX_OPEN
from serve.plan.calibration import (
    FEATURES,
    BurstRow,
    FittedCost,
    fitted,
    load_calibration,
    non_negative,
)
from serve.plan.deployment import PlannedMethod, deploy, sizes_by_shape
from serve.plan.device import (
    BYTES,
    PROJECTIONS,
    ComputedCost,
    Device,
    StepWork,
    load_device,
    shape_of,
)
from serve.plan.plan_file import load_plan
from tests.serve.plan.on_paper import calibrated, calibration, plan


def slots_bytes(method: PlannedMethod) -> int:
    return method.sizes.slots * method.bytes_of.adapter


def test_this_machine_is_planned_with_what_was_measured_on_it(tmp_path: Path) -> None:
    calibrated(tmp_path)
    deployment = deploy(plan(), tmp_path)
    assert deployment.device is None and "c0ffee" in deployment.source
    assert deployment.hardware == "a core of a test" and deployment.price_an_hour == 3.6
    alora, lora = deployment.methods
    assert (alora.shares, lora.shares) == (True, False)
    assert isinstance(alora.cost, FittedCost) and alora.suffix_tokens == 3
    assert alora.sizes.step_tokens == 2048 and alora.sizes.max_open == MAX_OPEN
    assert slots_bytes(lora) > slots_bytes(alora)


def test_another_device_is_computed_and_never_called_measured(tmp_path: Path) -> None:
    deployment = deploy(load_plan("qwen3-4b_h100", {}), tmp_path)
    assert deployment.device is not None and deployment.price_an_hour == 3.0
    assert all(isinstance(method.cost, ComputedCost) for method in deployment.methods)
    tiny = deploy(load_plan("tiny_here", {"device": "l4"}), tmp_path)
    assert tiny.methods[0].suffix_tokens == 3, "by the recipe's own tokenizer"
    assert tiny.price_an_hour == 0.1, "the plan's price, not the device's"


def test_slots_are_as_many_and_as_large_as_the_engine_s(tmp_path: Path) -> None:
    recipe = load_recipe("qwen3-4b")
    alora, lora = deploy(load_plan("qwen3-4b_h100", {}), tmp_path).methods
    assert alora.sizes.slots == lora.sizes.slots == recipe.engine["max_loras"]
    assert slots_bytes(lora) == slots_bytes(alora), "a slot takes any rank"
    half = deploy(load_plan("qwen3-4b_h100", {"slots": 64}), tmp_path).methods[0]
    assert slots_bytes(half) == slots_bytes(alora) / 2


def test_memory_is_split_as_the_engine_splits_it(tmp_path: Path) -> None:
    calibrated(tmp_path)
    recipe = load_recipe("tiny")
    planned = deploy(plan(slots=7), tmp_path).methods[0]
    targets = recipe.settings("alora").lora["target_modules"]
    args = engine_args(recipe, [], {"max_loras": 7, "lora_target_modules": targets})
    assert planned.sizes.slots == args["max_loras"]
    cache_bytes = args["kv_cache_memory_bytes"]
    assert planned.sizes.cache_tokens == cache_bytes // planned.bytes_of.token


def test_the_memory_that_is_stated_holds_the_weights_too_here_as_on_a_named_device(
    tmp_path: Path,
) -> None:
    calibrated(tmp_path)
    for gib, replaced in ((2.0, {}), (8.0, {"device": "l4"})):
        deployment = deploy(plan(memory_gib=gib, **replaced), tmp_path)
        method = deployment.methods[0]
        bytes_of = method.bytes_of
        parts_bytes = bytes_of.weights + slots_bytes(method)
        parts_bytes += method.sizes.cache_tokens * bytes_of.token
        if deployment.device is not None:
            parts_bytes += round(deployment.device.workspace_gib * GIB)
        assert 0 <= gib * GIB - parts_bytes <= bytes_of.token


def test_the_host_beside_a_named_device_holds_fewer_adapters_than_their_bytes_say(
    tmp_path: Path,
) -> None:
    plan_of_many = load_plan("qwen3-4b_h100", {"traffic.rules": 1000, "host_gib": 64.0})
    method = deploy(plan_of_many, tmp_path).methods[0]
    # Of rank 32, in each of 36 layers: A and B of width 2,560 are 2**18 bytes when pinned, of 4,096
    # 2**18, of 1,024 2**16, of 9,728 2**20.
    of_a_layer = 2**18 * (1 + 1) + 2 * (2**18 + 2**16) + 2**18 * (1 + 1) + 3 * (2**18 + 2**20)
    assert method.bytes_of.host_adapter == 36 * of_a_layer
    assert method.sizes.host_adapters == 64 * GIB // (36 * of_a_layer)
    assert method.sizes.host_adapters < 0.75 * 64 * GIB / method.bytes_of.adapter
    calibrated(tmp_path)  # no more than there are, and no fewer than slots
    few = deploy(plan(slots=8), tmp_path).methods[0].sizes
    assert (few.slots, few.host_adapters) == (8, 1)
    traffic = {"rules_a_check": [1, 1], "rules": 100}
    many = deploy(plan(slots=8, host_gib=1e-6, traffic=traffic), tmp_path).methods[0].sizes
    assert (many.slots, many.host_adapters) == (8, 8)


@pytest.mark.parametrize(
    ("replaced", "words"),
    [
        ({"price_an_hour": None}, "State `price_an_hour`"),
        ({"suffix_tokens": 9}, "another suffix.*it is 3"),
        ({"memory_gib": 0.001}, "the base does not fit.*got 0.001 GiB"),
        ({"model": "qwen3-4b"}, "State the base's `shape`"),
        ({"model": "qwen3-0.6b", "shape": True}, "calibration is of another model.*got tiny"),
        ({"model": "minilm"}, "no decoder"),
        ({"device": "h10"}, "Did you mean 'h100'"),
        ({"slots": 10**9}, "does not hold"),
        ({"model": "qwen3-4b", "shape": True, "device": "h100"}, "State `suffix_tokens`"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, replaced: dict[str, object], words: str
) -> None:
    calibrated(tmp_path)
    if "shape" in replaced:
        replaced = replaced | {"shape": load_plan("qwen3-4b_h100", {}).shape}
    with pytest.raises(GuardError, match=words):
        deploy(plan().model_copy(update=replaced), tmp_path)


def test_without_a_calibration_or_a_figure_of_memory_nothing_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GuardError, match=r"not calibrated.*make bench NAME=calibrate"):
        deploy(plan(), tmp_path)
    calibrated(tmp_path)
    recipe = load_recipe("tiny").model_copy(update={"serving_memory": ServingMemory()})
    monkeypatch.setattr("serve.plan.deployment.load_recipe", lambda name: recipe)
    with pytest.raises(GuardError, match="State `memory_gib`"):
        deploy(plan(), tmp_path)


SHAPE = shape_of(load_recipe("tiny"))
ADAPTER = 1_000_000


def device(**replaced: object) -> Device:
    """An L4 with figures that are easy to reckon with."""
    peaks = {"peak_tflops": 2.0, "memory_gb_s": 100.0, "compute_share": 0.5, "memory_share": 0.5}
    host = {"host_step_ms": 3.0, "host_rule_ms": 0.5, "host_check_ms": 0.25, "host_token_us": 2.0}
    copies = {"host_to_device_gb_s": 10.0, "disk_gb_s": 1.0}
    return load_device("l4").model_copy(update=peaks | host | copies | replaced)


COST = ComputedCost(device(), SHAPE, 2, ADAPTER)


def test_many_tokens_are_bound_by_operations() -> None:
    work = StepWork(steps=1, tokens=10_000, adapted=100, pairs=5e6, sequences=2)
    flops = 10_000 * SHAPE.token_flops() + 5e6 * SHAPE.pair_flops() + 100 * 2 * ADAPTER
    assert COST.compute_s(work) == pytest.approx(flops / 1e12)
    assert COST.compute_s(work) > COST.memory_s(work)
    assert COST.step_ms(work) == pytest.approx(1000 * flops / 1e12 + 3.0 + 2 * 0.5)


def test_few_tokens_are_bound_by_reading_weights_adapters_and_earlier_context() -> None:
    work = StepWork(steps=1, tokens=3, sequences=3, reads=3000)
    numbers = SHAPE.weights + 3 * ADAPTER + 3000 * SHAPE.key_value_width
    assert COST.memory_s(work) == pytest.approx(2 * numbers / 50e9)
    assert COST.step_ms(work) == pytest.approx(1000 * 2 * numbers / 50e9 + 3.0 + 3 * 0.5)


def test_a_copy_and_a_read_take_the_adapters_bytes() -> None:
    assert COST.swap_s(StepWork(swap_ins=5)) == pytest.approx(5 * 2e6 / 10e9)
    assert COST.swap_s(StepWork(loads=5)) == pytest.approx(5 * 2e6 / 1e9)
    assert COST.submit_ms(1000, 7) == pytest.approx(0.25 + 2.0)


@pytest.mark.parametrize("device_here", ["cpu", "cuda"])
def test_sizes_are_those_that_the_engine_counts(
    monkeypatch: pytest.MonkeyPatch, device_here: str
) -> None:
    recipe = load_recipe("tiny")
    monkeypatch.setattr(arguments, "installed_device", lambda: device_here)
    for targets in (PROJECTIONS, ("q_proj", "o_proj")):
        counted = sizes_of(recipe, 16, targets)
        tensors = SHAPE.adapter_tensors(16, targets)
        width, is_pinned = BYTES[recipe.serving_dtype], device_here == "cuda"
        assert sizes_by_shape(SHAPE, tensors, width, is_pinned=is_pinned) == counted
        assert (counted.host_adapter > counted.adapter) == is_pinned


def test_qwen3_4b_has_four_billion_parameters_and_an_adapter_its_published_size() -> None:
    shape = load_plan("qwen3-4b_h100", {}).shape
    assert shape is not None
    assert shape.weights == pytest.approx(4.02e9, rel=0.01)
    assert 2 * sum(shape.adapter_tensors(32, PROJECTIONS)) == pytest.approx(132e6, rel=0.01)
    assert shape.token_flops() == pytest.approx(7.27e9, rel=0.01)
    untied = shape.model_copy(update={"tie_word_embeddings": False})
    assert untied.weights == shape.weights + shape.vocab_size * shape.hidden_size


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
