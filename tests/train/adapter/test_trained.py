"""A trained adapter is written as PEFT's two files, which name no path of this machine, while it
stands on its base.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.variants import calculate_alora_offsets
from pytest import MonkeyPatch
from torch import nn
from transformers import AutoModelForCausalLM

from guard.prompt.decoder import Prompt, PromptBuilder
from tests.train.conftest import (
    ADAPTERS,
    RULE,
    MakeJob,
    conversation,
    data,
    layers_by_onednn,
    multiply_by_torch,
)
from train.adapter.trained import TrainedAdapter, verdict_logits
from train.batch import left_padded
from train.prefix.trainer import fit


def test_an_adapter_is_gone_once_the_next_is_asked_for(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("alora", max_steps=1)
    rows = data(job)
    (trained,) = fit([(job, rows)])
    assert isinstance(trained, TrainedAdapter) and len(trained.validation_logits) > 0
    with pytest.raises(RuntimeError, match="the next one was asked for"):
        trained.logits([rows.validation[0].prompt])
    with pytest.raises(RuntimeError, match="the next one was asked for"):
        trained.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.fixture(scope="module")
def builder(toy_base: Path) -> PromptBuilder:
    return PromptBuilder.from_base(str(toy_base))


@pytest.fixture(scope="module")
def prompts(builder: PromptBuilder) -> list[Prompt]:
    rng = random.Random(1)
    return [builder.build(conversation(rng, index % 2), RULE.title) for index in range(9)]


def random_adapter(
    base: Path, builder: PromptBuilder, method: str, dtype: torch.dtype = torch.float32
) -> PeftModel:
    """An adapter with weights that matter: PEFT's own start is a B of zeros."""
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    if method == "alora":
        config.alora_invocation_tokens = list(builder.invocation("a rule"))
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


@pytest.mark.parametrize("method", ADAPTERS)
def test_a_row_in_a_padded_batch_has_the_difference_of_log_probabilities_that_it_has_alone(
    toy_base: Path,
    builder: PromptBuilder,
    prompts: list[Prompt],
    method: str,
    monkeypatch: MonkeyPatch,
) -> None:
    """And a model in training is left in training."""
    monkeypatch.setattr("train.batch.PASS_TOKENS", 10_000)
    model = random_adapter(toy_base, builder, method)
    assert len({len(prompt.token_ids) for prompt in prompts}) > 5
    alone: list[float] = []
    for prompt in prompts:
        with torch.inference_mode():
            log_p = model(torch.tensor([prompt.token_ids])).logits[0, -1].log_softmax(0)
        alone.append(float(log_p[builder.yes_id] - log_p[builder.no_id]))
    together = verdict_logits(model.train(), prompts, builder)
    assert model.training
    assert together == pytest.approx(alone, abs=1e-4)
    assert max(together) - min(together) > 1e-2  # and the rows do differ


def test_where_an_alora_acts(toy_base: Path, builder: PromptBuilder, prompts: list[Prompt]) -> None:
    model = random_adapter(toy_base, builder, "alora")
    batch = left_padded([prompt.token_ids for prompt in prompts])
    from_the_end = calculate_alora_offsets(model.peft_config, "default", batch["input_ids"])
    assert from_the_end == [len(prompt.token_ids) - prompt.invocation_start for prompt in prompts]
    with torch.inference_mode():
        adapted = model(**batch, output_hidden_states=True).hidden_states[-1]
        with model.disable_adapter():
            base = model(**batch, output_hidden_states=True).hidden_states[-1]
    changed = (adapted - base).abs().amax(dim=2) > 1e-6
    longest = batch["input_ids"].shape[1]
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt.token_ids) + prompt.invocation_start
        first = longest - len(prompt.token_ids)
        assert not changed[row, first:start].any()
        assert changed[row, start:].all()


@pytest.mark.parametrize("method", ADAPTERS)
def test_where_mkl_is_slow_the_logits_are_those_of_plain_products(
    toy_base: Path, prompts: list[Prompt], method: str, monkeypatch: MonkeyPatch
) -> None:
    builder = PromptBuilder.from_base(str(toy_base))
    model = random_adapter(toy_base, builder, method)
    multiply_by_torch(monkeypatch)
    plain = verdict_logits(model, prompts, builder)
    products = layers_by_onednn(monkeypatch)
    assert verdict_logits(model, prompts, builder) == pytest.approx(plain, abs=1e-4)
    assert {module for module in model.modules() if type(module) is nn.Linear} == set(products)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("method", ADAPTERS)
def test_the_output_layer_of_a_bfloat16_base_computes_in_float32(
    toy_base: Path, builder: PromptBuilder, prompts: list[Prompt], method: str
) -> None:
    model = random_adapter(toy_base, builder, method, torch.bfloat16)
    found = torch.tensor(verdict_logits(model, prompts, builder), dtype=torch.float64)
    exact = verdict_logits(random_adapter(toy_base, builder, method), prompts, builder)
    assert found.tolist() == pytest.approx(exact, abs=0.15)
    assert not torch.equal(found, found.bfloat16().double())
    head = model.get_output_embeddings()
    states: list[torch.Tensor] = []
    hook = head.register_forward_hook(lambda _, inputs, output: states.append(inputs[0][:, -1]))
    with torch.inference_mode():
        for prompt in prompts:
            model(torch.tensor([prompt.token_ids]), logits_to_keep=1)
    hook.remove()
    columns = head.weight[[builder.yes_id, builder.no_id]].double()
    yes, no = (torch.cat(states).double() @ columns.T).unbind(1)
    torch.testing.assert_close(found, yes - no, atol=0.05, rtol=0)  # padding moves the states
    alone = [verdict_logits(model, [prompt], builder)[0] for prompt in prompts]
    expected = (yes - no).tolist()
    assert alone == pytest.approx(expected, abs=1e-5)
    assert head.weight.dtype == torch.bfloat16 and not head._forward_hooks
