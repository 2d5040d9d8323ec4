"""The roofline by hand, and sizes against those of the engine."""

from __future__ import annotations

import pytest

from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.engine.backends import arguments
from serve.engine.backends.arguments import sizes_of
from serve.plan.deployment import sizes_by_shape
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

SHAPE = shape_of(load_recipe("tiny"))
ADAPTER = 1_000_000


def device(**replaced: object) -> Device:
    """An L4 with figures that are easy to reckon with."""
    peaks = {"peak_tflops": 2.0, "memory_gb_s": 100.0, "compute_share": 0.5, "memory_share": 0.5}
    host = {"host_step_ms": 3.0, "host_rule_ms": 0.5, "host_check_ms": 0.25, "host_token_us": 2.0}
    copies = {"host_to_device_gb_s": 10.0, "disk_gb_s": 1.0}
    return load_device("l4").model_copy(update=peaks | host | copies | replaced)


def test_many_tokens_are_bound_by_operations() -> None:
    cost = ComputedCost(device(), SHAPE, 2, ADAPTER)
    work = StepWork(steps=1, tokens=10_000, adapted=100, pairs=5e6, sequences=2)
    flops = 10_000 * SHAPE.token_flops() + 5e6 * SHAPE.pair_flops() + 100 * 2 * ADAPTER
    assert cost.compute_s(work) == pytest.approx(flops / 1e12)
    assert cost.compute_s(work) > cost.memory_s(work)
    assert cost.step_ms(work) == pytest.approx(1000 * flops / 1e12 + 3.0 + 2 * 0.5)


def test_few_tokens_are_bound_by_reading_weights_adapters_and_earlier_context() -> None:
    cost = ComputedCost(device(), SHAPE, 2, ADAPTER)
    work = StepWork(steps=1, tokens=3, sequences=3, reads=3000)
    numbers = SHAPE.weights + 3 * ADAPTER + 3000 * SHAPE.key_value_width
    assert cost.memory_s(work) == pytest.approx(2 * numbers / 50e9)
    assert cost.step_ms(work) == pytest.approx(1000 * 2 * numbers / 50e9 + 3.0 + 3 * 0.5)


def test_a_copy_and_a_read_take_the_adapters_bytes() -> None:
    cost = ComputedCost(device(), SHAPE, 2, ADAPTER)
    assert cost.swap_s(StepWork(swap_ins=5)) == pytest.approx(5 * 2e6 / 10e9)
    assert cost.swap_s(StepWork(loads=5)) == pytest.approx(5 * 2e6 / 1e9)
    assert cost.submit_ms(1000, 7) == pytest.approx(0.25 + 2.0)


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


def test_a_projection_that_does_not_exist_is_refused() -> None:
    with pytest.raises(GuardError, match=r"no such projection.*got qkv.*Known: q_proj"):
        SHAPE.adapter_tensors(8, ["qkv"])


def test_an_untied_output_layer_counts_its_own() -> None:
    tied = SHAPE.weights
    untied = SHAPE.model_copy(update={"tie_word_embeddings": False})
    assert untied.weights == tied + SHAPE.vocab_size * SHAPE.hidden_size
