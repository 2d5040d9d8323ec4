"""The counts against those of the base itself, in PyTorch."""

from __future__ import annotations

import pytest

from guard.errors import GuardError
from guard.machine.device import installed_device
from guard.recipe import load_recipe
from serve.engine.backends.arguments import sizes_of
from serve.plan.device.architecture import (
    PROJECTIONS,
    DecoderShape,
    adapter_rank,
    adapter_targets,
    shape_of,
)
from serve.plan.device.memory import sizes_by_shape
from serve.plan.plan_file import load_plan


def test_sizes_are_those_that_the_engine_counts_on_the_tiny_base() -> None:
    recipe = load_recipe("tiny")
    shape, width = shape_of(recipe), 2 if recipe.serving_dtype == "bfloat16" else 4
    for targets in (PROJECTIONS, ("q_proj", "o_proj")):
        counted = sizes_of(recipe, 16, targets)
        tensors = shape.adapter_tensors(16, targets)
        is_pinned = installed_device() == "cuda"
        assert sizes_by_shape(shape, tensors, width, is_pinned=is_pinned) == counted


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
    shape = shape_of(load_recipe("tiny"))
    with pytest.raises(GuardError, match=r"no such projection.*got qkv.*Known: q_proj"):
        shape.adapter_tensors(8, ["qkv"])


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
