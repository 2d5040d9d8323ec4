"""A trained adapter while it stands on its base: its logits, and what it writes.

Of a base in 4 bits it is the same by either trainer, and served on the base as it is.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel, get_peft_model
from pytest import MonkeyPatch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from guard.errors import GuardError
from guard.method import PEFT_CONFIG, PEFT_WEIGHTS
from tests.train.conftest import (
    ADAPTERS,
    MakeJob,
    data,
    largest_difference,
    weights,
    with_lora,
    with_recipe,
)
from train import run
from train.adapter import trl
from train.adapter.load import check_adapter, load_base
from train.adapter.settings import lora_config
from train.adapter.trained import TrainedAdapter, save_adapter, verdict_logits
from train.base import load_served_base
from train.batch import left_padded
from train.job import Job
from train.methods import TRAINERS
from train.rounded import TYPES, round_as_served, rounded


def test_an_adapter_is_gone_once_the_next_is_asked_for(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("alora", max_steps=1)
    rows = data(job)
    (trained,) = TRAINERS["decoder"]["alora"].fit([(job, rows)])
    assert isinstance(trained, TrainedAdapter) and len(trained.validation_logits) > 0
    with pytest.raises(RuntimeError, match="the next one was asked for"):
        trained.logits([rows.validation[0].prompt])
    with pytest.raises(RuntimeError, match="the next one was asked for"):
        trained.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def random_adapter(job: Job, dtype: torch.dtype = torch.float32) -> PeftModel:
    """An adapter with weights that matter: PEFT's own start is a B of zeros."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(job.recipe.base_path, dtype=dtype)
    model = get_peft_model(base, lora_config(with_lora(job, init_lora_weights=False)))
    return cast(PeftModel, model.eval())


def test_the_base_is_called_what_the_recipe_calls_it(make_job: MakeJob, tmp_path: Path) -> None:
    """And not where it lay on this machine."""
    job = make_job()
    save_adapter(random_adapter(job), with_recipe(job, base="someone/base").recipe, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {PEFT_CONFIG, PEFT_WEIGHTS, "runs"}
    written = json.loads((tmp_path / PEFT_CONFIG).read_text())
    assert written["base_model_name_or_path"] == "someone/base"
    assert job.recipe.base not in (tmp_path / PEFT_CONFIG).read_text()


def test_the_output_layer_of_a_bfloat16_base_computes_in_float32(make_job: MakeJob) -> None:
    job = make_job()
    prompts, builder = [row.prompt for row in data(job).test[:9]], job.builder
    model = random_adapter(job, torch.bfloat16)
    found = torch.tensor(verdict_logits(model, prompts, builder), dtype=torch.float64)
    exact = verdict_logits(random_adapter(job), prompts, builder)
    assert found.tolist() == pytest.approx(exact, abs=0.15)
    assert not torch.equal(found, found.bfloat16().double())
    head = model.get_output_embeddings()
    states: list[torch.Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][:, -1]))
    alone = [verdict_logits(model, [prompt], builder)[0] for prompt in prompts]
    hook.remove()
    columns = head.weight[[builder.yes_id, builder.no_id]].double()
    yes, no = (torch.cat(states).double() @ columns.T).unbind(1)
    assert alone == pytest.approx((yes - no).tolist(), abs=1e-5)
    assert head.weight.dtype == torch.bfloat16 and not head._forward_hooks


def test_the_output_layer_is_not_copied_for_every_row(make_job: MakeJob) -> None:
    """As matmul does where the rows that it reads do not lie side by side."""
    job = make_job()
    model, rows = random_adapter(job), data(job).test[:9]
    read: list[torch.Tensor] = []
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    verdict_logits(model, [row.prompt for row in rows], job.builder)
    inputs = left_padded([row.prompt.token_ids for row in rows])
    inputs["verdict_ids"] = torch.tensor([row.verdict_id(job.builder) for row in rows])
    trl.VerdictTrainer.compute_loss(cast(Any, None), model, inputs, num_items_in_batch=len(rows))
    hook.remove()
    assert len(read) >= 2 and all(len(states) > 1 for states in (read[0], read[-1]))
    assert all(states.is_contiguous() for states in read)


CPU = torch.device("cpu")


@pytest.mark.parametrize("method", ADAPTERS)
def test_modules_are_missed_without_the_base_s_weights(make_job: MakeJob, method: str) -> None:
    check_adapter(make_job(method))
    with pytest.raises(GuardError, match=rf"methods\.{method}\.lora.*q_prj"):
        check_adapter(with_lora(make_job(method), target_modules=["q_prj"]))


def in_4_bits(job: Job) -> Job:
    return with_recipe(job, quantization="nf4")


def on_rounded_weights(job: Job, folder: Path) -> Job:
    """The job on a base without quantization whose weights are those that 4 bits stand for."""
    served, quantised = load_served_base(job.recipe, CPU), load_base(in_4_bits(job).recipe, CPU)
    for name, layer in quantised.named_modules():
        if isinstance(layer, Linear4bit):
            weight = layer.weight
            rounded = dequantize_4bit(weight.data, weight.quant_state).float()
            served.get_submodule(name).weight.data = rounded
    served.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(job.recipe.base_path) / file, folder / file)
    return with_recipe(job, base=str(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "tolerance"),
    [("alora", 0.01), ("lora", 0.06)],  # TRL rounds the weights that it starts from to bfloat16
)
def test_in_4_bits_an_adapter_is_the_one_that_trl_and_peft_train_on_the_rounded_weights(
    make_job: MakeJob, tmp_path: Path, method: str, tolerance: float
) -> None:
    """It stands on the base that serves it, and so do its verdicts."""
    one, reference, other = (
        make_job(method, max_steps=12, adam_epsilon=1e-4, runs=runs)
        for runs in ("one", "reference", "other")
    )
    reference = on_rounded_weights(reference, tmp_path / "rounded")
    expected, otherwise = (weights(trl.fit(job, data(job))) for job in (reference, other))
    job = in_4_bits(one)
    adapter = next(TRAINERS["decoder"][method].fit([(job, data(job))]))
    assert isinstance(adapter, TrainedAdapter)
    found = weights(adapter.model)
    assert not any(isinstance(module, Linear4bit) for module in adapter.model.modules())
    prompts = [row.prompt for row in data(job).validation]
    logits = adapter.logits(prompts)
    if method == "alora":
        assert adapter.validation_logits == pytest.approx(logits, abs=1e-5)
    bare = load_served_base(job.recipe, CPU)(torch.tensor([prompts[0].token_ids])).logits[0, -1]
    of_base = float(bare[job.builder.yes_id] - bare[job.builder.no_id])
    assert abs(of_base - logits[0]) > 0.05  # the weights came along
    moved = max(float(weight.abs().max()) for name, weight in expected.items() if "lora_B" in name)
    assert largest_difference(found, expected) < tolerance * moved
    assert largest_difference(found, otherwise) > 0.1 * moved


@pytest.mark.slow
def test_an_evaluation_in_between_leaves_the_gradients_true(make_job: MakeJob) -> None:
    job = in_4_bits(make_job())
    model = load_base(job.recipe, CPU)
    layer = next(module for module in model.modules() if isinstance(module, Linear4bit))
    x = torch.randn(3, layer.in_features)
    dense = layer(torch.eye(layer.in_features)).detach()  # row i: the weights of input i
    with torch.no_grad():
        layer.eval()(x)
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, dense.sum(1).expand(3, -1), rtol=1e-4, atol=1e-4)


def test_machines_that_cannot_quantise_stop(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    job = in_4_bits(make_job("alora"))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    told = r"recipe toy: quantization: this machine cannot train in 4 bits"
    with pytest.raises(GuardError, match=told):
        run.check([job])


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.usefixtures("own_cache")
def test_layers_are_rounded_as_what_the_engine_loads(make_job: MakeJob, name: str) -> None:
    recipe = with_recipe(make_job(), serving_quantization=name).recipe
    base: Any = load_served_base(recipe, CPU)
    made = load_file(Path(recipe.served_path) / "model.safetensors")
    embedding = made.pop("model.embed_tokens.weight")
    assert torch.equal(base.get_input_embeddings().weight, rounded(embedding, torch.int8))
    for key in filter(lambda key: not key.endswith("_scale"), made):
        scale = made.get(f"{key}_scale", torch.ones(1))
        assert torch.equal(base.get_parameter(key), made[key].float() * scale)
    layer = base.get_submodule("model.layers.1.mlp.up_proj")
    x = torch.randn(3, layer.in_features)
    assert torch.equal(layer(x), linear(rounded(x, TYPES[name]), layer.weight))


def test_an_adapter_reads_what_the_layer_rounds_and_gradients_pass() -> None:
    model: Any = nn.ModuleDict({"layer": nn.Linear(8, 4, bias=False)})
    model.get_output_embeddings = lambda: None
    model.get_input_embeddings = lambda: nn.Embedding(2, 2)
    round_as_served(model, torch.int8)
    weight, x = model["layer"].weight.detach(), torch.randn(3, 8, requires_grad=True)
    config = LoraConfig(r=2, target_modules=["layer"], init_lora_weights=False)
    layer: Any = get_peft_model(model, config).get_submodule("base_model.model.layer")
    low_rank, scales = layer.get_delta_weight("default"), x.detach().abs().amax(1, True) / 127
    expected = linear((x.detach() * (1 / scales)).round() * scales, weight) + linear(x, low_rank)
    torch.testing.assert_close(layer(x), expected)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(gradient, (weight + low_rank).sum(0).expand(3, -1))


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("method", ADAPTERS)
def test_what_is_trained_answers_on_the_served_base(make_job: MakeJob, method: str) -> None:
    def trained(**quantizations: str) -> tuple[PeftModel, torch.Tensor]:
        job = with_recipe(make_job(method, max_steps=4, runs=str(quantizations)), **quantizations)
        adapter = next(TRAINERS["decoder"][method].fit([(job, data(job))]))
        assert isinstance(adapter, TrainedAdapter)
        logits = adapter.logits([row.prompt for row in data(job).validation])
        assert adapter.validation_logits in ((), pytest.approx(logits, abs=1e-3))
        return adapter.model, torch.tensor(logits)

    whole, on_whole = trained()
    rounded_after, on_rounded = trained(serving_quantization="int8")
    assert largest_difference(weights(whole), weights(rounded_after)) == 0
    assert (on_whole - on_rounded).abs().max() > 2e-3
    in_both, _ = trained(quantization="nf4", serving_quantization="nf4")
    assert any(isinstance(module, Linear4bit) for module in in_both.modules())
