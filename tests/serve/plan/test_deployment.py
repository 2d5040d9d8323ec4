from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.recipe import ServingMemory, load_recipe
from serve.engine.backends.arguments import GIB, engine_args
from serve.engine.thread.engine_thread import MAX_OPEN
from serve.plan.calibration import FittedCost
from serve.plan.deployment import PlannedMethod, deploy
from serve.plan.device import ComputedCost
from serve.plan.plan_file import load_plan
from tests.serve.plan.on_paper import calibrated, plan


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
    assert deployment.methods[0].bytes_of.weights == pytest.approx(8.04e9, rel=0.01)
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
