"""A base that is served in 8 bits: in transformers its linear layers compute what the engine's do,
and what is trained on the whole base is calibrated there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from pytest import MonkeyPatch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import linear

from tests.train.conftest import MakeJob, data, largest_difference, weights, with_recipe
from train.adapter.trained import TrainedAdapter
from train.base import load_base_in, load_served_base
from train.methods import TRAINERS
from train.rounded import round_as_served, rounded

CPU = torch.device("cpu")
LARGEST = {"int8": 127.0, "fp8": 448.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("guard.made_base.CACHE", tmp_path / "cache")


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_products_are_of_what_the_engine_loads_and_of_rounded_tokens(
    make_job: MakeJob, name: str
) -> None:
    recipe = with_recipe(make_job(), serving_quantization=name).recipe
    made = load_file(Path(recipe.served_path) / "model.safetensors")
    base: Any = load_served_base(recipe, CPU)
    assert torch.equal(base.get_input_embeddings().weight, made["model.embed_tokens.weight"])
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)) * torch.arange(5)[:, None]
    scales = x.abs().amax(-1, keepdim=True) / LARGEST[name]
    levels = torch.nan_to_num(x / scales)  # the first token is zero
    dtype = made["model.layers.0.mlp.up_proj.weight"].dtype
    levels = levels.round() if name == "int8" else levels.to(dtype).float()
    for layer, kind in ((0, "mlp.up_proj"), (1, "self_attn.q_proj")):
        key = f"model.layers.{layer}.{kind}.weight"
        weight = made[key].float() * made[f"{key}_scale"]
        expected = linear(levels * scales, weight)
        module = base.get_submodule(key.removesuffix(".weight"))
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-6)
        assert (linear(x, weight) - expected).abs().max() > 1e-3


def test_an_adapter_reads_what_the_layer_rounds_and_gradients_pass() -> None:
    model: Any = nn.ModuleDict({"layer": nn.Linear(8, 4, bias=False)})
    model.get_output_embeddings = lambda: None
    round_as_served(model, torch.int8)
    weight = model["layer"].weight.detach().clone()
    config = LoraConfig(r=2, target_modules=["layer"], init_lora_weights=False)
    adapted: Any = get_peft_model(model, config).get_submodule("base_model.model.layer")
    x = torch.randn(3, 8, requires_grad=True)
    y = adapted(x)
    a, b = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
    low_rank = linear(linear(x, a), b) * adapted.scaling["default"]
    torch.testing.assert_close(y, linear(rounded(x, torch.int8), weight) + low_rank)
    y.sum().backward()
    assert x.grad is not None
    by_adapter = (b @ a).sum(0) * adapted.scaling["default"]
    torch.testing.assert_close(x.grad, (weight.sum(0) + by_adapter).expand(3, -1))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["alora", "lora"])
def test_what_is_trained_on_the_whole_base_answers_on_the_one_that_is_served(
    make_job: MakeJob, method: str
) -> None:
    whole, served = (make_job(method, max_steps=4, runs=runs) for runs in ("whole", "served"))
    served = with_recipe(served, serving_quantization="int8")
    trained = [next(TRAINERS["decoder"][method].fit([(job, data(job))])) for job in (whole, served)]
    on_whole, on_served = (adapter for adapter in trained if isinstance(adapter, TrainedAdapter))
    assert largest_difference(weights(on_whole.model), weights(on_served.model)) == 0
    prompts = [row.prompt for row in data(served).validation]
    answered = on_served.logits(prompts)
    if method == "alora":
        assert on_served.validation_logits == pytest.approx(answered, abs=1e-6)
    assert max(abs(a - b) for a, b in zip(answered, on_whole.logits(prompts), strict=True)) > 1e-3


@pytest.mark.slow
def test_what_is_trained_and_served_in_4_bits_answers_there(make_job: MakeJob) -> None:
    both = {"quantization": "nf4", "serving_quantization": "nf4"}
    job = with_recipe(make_job("alora", max_steps=2), **both)
    adapter = next(TRAINERS["decoder"]["alora"].fit([(job, data(job))]))
    assert isinstance(adapter, TrainedAdapter)
    assert any(isinstance(module, Linear4bit) for module in adapter.model.modules())
    logits = adapter.logits([row.prompt for row in data(job).validation])
    assert adapter.validation_logits == pytest.approx(logits, abs=1e-3)
    whole = load_base_in(None, job.recipe, CPU)
    assert not any(isinstance(module, Linear4bit) for module in whole.modules())
