"""Low-rank updates of several adapters in one layer, each for its own rows."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from guard.errors import GuardError
from tests.train.conftest import SHAPE, LaunchCount
from train.prefix.stacked import Stacked, StackedModel, layers

WHERE = "recipe toy: methods.second.lora"


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval().requires_grad_(False)


def config(rank: int, *modules: str, scaling: int = 3) -> LoraConfig:
    return LoraConfig(
        r=rank, lora_alpha=scaling * rank, target_modules=list(modules), init_lora_weights=False
    )


@pytest.mark.parametrize("scalings", [(3, 3), (3, 7)])
def test_rows_get_their_own_update(model: Qwen3ForCausalLM, scalings: tuple[int, int]) -> None:
    base = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert isinstance(base, nn.Linear)
    first, second = scalings
    configs = [config(2, "q_proj", scaling=first), config(5, "q_proj", scaling=second)]
    StackedModel(model, configs, [0, 1], [WHERE, WHERE])
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert isinstance(layer, Stacked)
    rows = torch.randn(4, 3, 64)
    assert torch.equal(layer(rows), base(rows))  # outside a pass
    layer.acting = (1, 0)
    updated = layer(rows)
    for adapter, half in ((1, slice(0, 2)), (0, slice(2, 4))):
        a, b = layer.factors[adapter]
        expected = base(rows[half]) + scalings[adapter] * rows[half] @ a.T @ b.T
        torch.testing.assert_close(updated[half], expected)


def test_a_layer_of_many_adapters_launches_no_more_than_one_of_two(model: Qwen3ForCausalLM) -> None:
    base = model.get_submodule("model.layers.0.self_attn.q_proj")
    StackedModel(model, [config(4, "q_proj")] * 8, list(range(8)), [WHERE] * 8)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert isinstance(layer, Stacked)

    def launches(adapters: int) -> int:
        layer.acting = range(adapters)
        with LaunchCount() as count:
            layer(torch.randn(8, 3, 64)).square().sum().backward()
        for adapter in layer.acting:
            a, b = layer.factors[adapter]
            assert a.grad is not None and b.grad is not None
            a.grad = b.grad = None
        return count.launches

    assert launches(8) == launches(2)
    assert isinstance(base, nn.Linear) and base.weight.grad is None


def test_the_layers_of_an_adapter_are_counted_and_the_base_stays(model: Qwen3ForCausalLM) -> None:
    """A layer that is not linear is refused."""
    counts = layers(model, config(4, "q_proj"), WHERE)
    name = "model.layers.{}.self_attn.q_proj"
    assert counts == {name.format(number): 4 * (64 + 64) for number in range(2)}
    assert type(model.get_submodule(name.format(0))) is nn.Linear
    told = r"methods\.second\.lora, target_modules: only linear layers.*embed_tokens"
    with pytest.raises(GuardError, match=told):
        layers(model, config(4, "embed_tokens"), WHERE)
