"""The roofline by hand, and sizes against those of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.engine.backends import arguments
from serve.engine.backends.arguments import sizes_of
from serve.plan.deployment import sizes_by_shape
from serve.plan.device import (
    BYTES,
    DEVICES,
    PROJECTIONS,
    ComputedCost,
    DecoderShape,
    Device,
    StepWork,
    adapter_rank,
    adapter_targets,
    load_device,
    shape_of,
)
from serve.plan.plan_file import load_plan

SHAPE = shape_of(load_recipe("tiny"))
ADAPTER = 1_000_000


def device(**replaced: object) -> Device:
    fields: dict[str, object] = {
        "name": "toy",
        "source": "none",
        "peak_tflops": 2.0,
        "memory_gb_s": 100.0,
        "memory_gib": 8.0,
        "compute_share": 0.5,
        "memory_share": 0.5,
        "host_step_ms": 3.0,
        "host_rule_ms": 0.5,
        "host_check_ms": 0.25,
        "host_token_us": 2.0,
        "host_source": "none",
        "host_to_device_gb_s": 10.0,
        "disk_gb_s": 1.0,
        "price_an_hour": 1.0,
        "price_source": "none",
    }
    return Device.model_validate(fields | replaced)


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
    once = ComputedCost(device(reads_shared_once=True), SHAPE, 2, ADAPTER)
    assert once.memory_s(work) == pytest.approx(2 * (SHAPE.weights + 3 * ADAPTER) / 50e9)


def test_work_adds_up_field_by_field() -> None:
    total = StepWork(steps=1, tokens=10, pairs=2.5)
    total.add(StepWork(steps=2, tokens=5, pairs=1.5, sequences=3, swap_ins=1, loads=2, reads=7))
    assert total == StepWork(3, 15, 0, 4.0, 7, 3, 1, 2)


def test_a_copy_and_a_read_take_the_adapters_bytes() -> None:
    cost = ComputedCost(device(), SHAPE, 2, ADAPTER)
    assert cost.swap_s(StepWork(swap_ins=5)) == pytest.approx(5 * 2e6 / 10e9)
    assert cost.swap_s(StepWork(loads=5)) == pytest.approx(5 * 2e6 / 1e9)
    assert cost.submit_ms(1000, 7) == pytest.approx(0.25 + 2.0)


@pytest.mark.parametrize("path", sorted(DEVICES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_device_loads_and_says_where_its_figures_are_from(path: Path) -> None:
    loaded = load_device(path.stem)
    assert loaded.source and loaded.host_source and loaded.price_source


def test_an_unknown_device_names_the_known_ones() -> None:
    with pytest.raises(GuardError, match="Did you mean 'h100'"):
        load_device("h10")


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


def test_the_recipe_says_which_projections_of_which_rank() -> None:
    recipe = load_recipe("tiny")
    assert adapter_targets(recipe, "alora") == ("q_proj", "o_proj")
    assert adapter_targets(recipe, "lora") == PROJECTIONS
    assert adapter_rank(recipe, "alora") == 16


def test_a_projection_that_does_not_exist_is_refused() -> None:
    with pytest.raises(GuardError, match=r"no such projection.*got qkv.*Known: q_proj"):
        SHAPE.adapter_tensors(8, ["qkv"])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("qwen3-4b", "State the base's `shape` in the plan"),
        ("minilm", "no decoder of Qwen3's kind"),
    ],
)
def test_a_base_that_is_elsewhere_or_no_decoder_is_refused(model: str, words: str) -> None:
    with pytest.raises(GuardError, match=words):
        shape_of(load_recipe(model))


def test_an_untied_output_layer_counts_its_own() -> None:
    shape = DecoderShape(
        num_hidden_layers=1,
        hidden_size=4,
        intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=2,
        vocab_size=10,
        tie_word_embeddings=False,
        has_head_norms=False,
    )
    projections = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8
    assert shape.layer_weights == projections
    assert shape.weights == projections + 2 * 4 + 2 * 10 * 4 + 4
    assert shape.key_value_width == 2 * 1 * 1 * 2
    assert shape.pair_flops() == 4 * 2 * 2
