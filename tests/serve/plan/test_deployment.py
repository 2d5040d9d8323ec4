from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.engine.thread.engine_thread import MAX_OPEN
from serve.plan.deployment import deploy
from serve.plan.device.accelerator import ComputedCost
from serve.plan.device.calibration import FittedCost
from serve.plan.plan_file import load_plan
from tests.serve.plan.deployments import calibrated, plan


def test_this_machine_is_planned_with_what_was_measured_on_it(tmp_path: Path) -> None:
    calibrated(tmp_path)
    deployment = deploy(plan(), tmp_path)
    assert deployment.basis == "measured here" and "c0ffee" in deployment.source
    assert deployment.hardware == "a core of a test"
    alora, lora = deployment.methods
    assert (alora.shares, lora.shares) == (True, False)
    assert isinstance(alora.cost, FittedCost) and alora.suffix_tokens == 3
    assert alora.sizes.limits.step_tokens == 2048 and alora.sizes.max_open == MAX_OPEN
    assert lora.memory.adapters_bytes > alora.memory.adapters_bytes


def test_another_device_is_computed_and_never_called_measured(tmp_path: Path) -> None:
    deployment = deploy(load_plan("qwen3-4b_h100", {}), tmp_path)
    assert deployment.basis == "computed" and deployment.device is not None
    assert all(isinstance(method.cost, ComputedCost) for method in deployment.methods)
    alora = deployment.methods[0]
    assert alora.memory.weights_bytes == pytest.approx(8.04e9, rel=0.01)
    tiny = deploy(load_plan("tiny_here", {"device": "l4"}), tmp_path)
    assert tiny.methods[0].suffix_tokens == 3, "by the recipe's own tokenizer"


def test_slots_are_as_many_and_as_large_as_the_engine_s(tmp_path: Path) -> None:
    recipe = load_recipe("qwen3-4b")
    alora, lora = deploy(load_plan("qwen3-4b_h100", {}), tmp_path).methods
    assert alora.sizes.limits.slots == lora.sizes.limits.slots == recipe.engine["max_loras"]
    assert lora.memory.adapters_bytes == alora.memory.adapters_bytes, "a slot takes any rank"
    half = deploy(load_plan("qwen3-4b_h100", {"rank": 16, "slots": 64}), tmp_path).methods[0]
    assert half.memory.adapters_bytes == alora.memory.adapters_bytes / 2
    twice = deploy(load_plan("qwen3-4b_h100", {"rank": 64, "slots": 64}), tmp_path).methods[0]
    assert twice.memory.adapters_bytes == alora.memory.adapters_bytes


def test_the_memory_that_is_stated_holds_the_weights_too_here_as_on_a_named_device(
    tmp_path: Path,
) -> None:
    calibrated(tmp_path)
    here = deploy(plan(memory_gib=2.0), tmp_path).methods[0].memory
    parts_bytes = here.weights_bytes + here.adapters_bytes + here.cache_bytes
    assert parts_bytes == pytest.approx(2 * 2**30, abs=1)
    named = deploy(plan(memory_gib=8.0, device="l4"), tmp_path).methods[0].memory
    parts_bytes = named.weights_bytes + named.adapters_bytes + named.cache_bytes
    assert parts_bytes + named.workspace_bytes == pytest.approx(8 * 2**30, abs=1)


def test_the_rank_of_the_recipe_may_be_stated_here(tmp_path: Path) -> None:
    calibrated(tmp_path)
    assert deploy(plan(rank=16), tmp_path).methods == deploy(plan(), tmp_path).methods


def test_the_host_beside_a_named_device_holds_fewer_adapters_than_their_bytes_say(
    tmp_path: Path,
) -> None:
    plan_of_many = load_plan("qwen3-4b_h100", {"traffic.rules": 1000, "host_gib": 64.0})
    memory = deploy(plan_of_many, tmp_path).methods[0].memory
    # Of rank 32, in each of 36 layers: A and B of width 2,560 are 2**18 bytes when pinned, of 4,096
    # 2**18, of 1,024 2**16, of 9,728 2**20.
    of_a_layer = 2**18 * (1 + 1) + 2 * (2**18 + 2**16) + 2**18 * (1 + 1) + 3 * (2**18 + 2**20)
    assert memory.host_adapters == 64 * 2**30 // (36 * of_a_layer)
    assert memory.host_bytes <= 64 * 2**30 < memory.host_bytes + 36 * of_a_layer
    slot_bytes = memory.adapters_bytes // memory.slots
    assert memory.host_adapters < 0.75 * 64 * 2**30 / slot_bytes


@pytest.mark.parametrize(
    ("replaced", "words"),
    [
        ({"price_an_hour": None}, "State `price_an_hour`"),
        ({"suffix_tokens": 9}, "another suffix.*it is 3"),
        ({"memory_gib": 0.001}, "the base does not fit"),
        ({"rank": 8}, "adapters of another rank.*got 8.*it is 16 by aLoRA"),
        ({"model": "qwen3-4b"}, "State the base's `shape`"),
        ({"model": "minilm"}, "no decoder"),
        ({"device": "h10"}, "Did you mean 'h100'"),
        ({"slots": 10**9}, "does not hold"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, replaced: dict[str, object], words: str
) -> None:
    calibrated(tmp_path)
    with pytest.raises(GuardError, match=words):
        deploy(plan(**replaced), tmp_path)


def test_a_machine_that_was_not_calibrated_is_not_guessed_at(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match=r"not calibrated.*make bench NAME=calibrate"):
        deploy(plan(), tmp_path)
