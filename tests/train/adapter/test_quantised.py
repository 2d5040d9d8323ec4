"""Training on a base of 4 bits: the same by either trainer, served on the base as it is."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft import PeftModel

from guard.errors import GuardError
from tests.train.conftest import MakeJob, data, weights
from train import run
from train.adapter import load, trl
from train.adapter.predict import verdict_logits
from train.adapter.trained import TrainedAdapter
from train.job import Job
from train.prefix import trainer as shared_prefix

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def in_4_bits(job: Job) -> Job:
    return replace(job, recipe=job.recipe.model_copy(update={"quantization": "nf4"}))


@contextmanager
def trained(job: Job) -> Iterator[TrainedAdapter]:
    """The adapter as long as it is there: `fit` takes it off its base before the next."""
    fits = shared_prefix.fit([(job, data(job))])
    fitted = next(fits)
    assert isinstance(fitted, TrainedAdapter)
    yield fitted


def weights_of(job: Job) -> dict[str, torch.Tensor]:
    with trained(job) as fitted:
        return weights(fitted.model)


def on_rounded_weights(job: Job, folder: Path) -> Job:
    """The job on a base without quantization whose weights are those that 4 bits stand for."""
    served, quantised = (
        load.load_served_base(job.recipe, CPU),
        load.load_base(in_4_bits(job).recipe, CPU),
    )
    for name, layer in quantised.named_modules():
        if isinstance(layer, Linear4bit):
            served.get_submodule(name).weight.data = dequantize_4bit(
                layer.weight.data, layer.weight.quant_state
            ).float()
    served.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(job.recipe.base_path) / file, folder / file)
    return replace(job, recipe=job.recipe.model_copy(update={"base": str(folder)}))


def assert_same(
    found: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    otherwise: dict[str, torch.Tensor],
    tolerance: float,
) -> None:
    moved = max(float(weight.abs().max()) for name, weight in expected.items() if "lora_B" in name)
    assert found.keys() == expected.keys()
    assert (
        max(float((found[name] - expected[name]).abs().max()) for name in found) < tolerance * moved
    )
    assert max(float((found[name] - otherwise[name]).abs().max()) for name in found) > 0.1 * moved


def test_an_alora_is_the_one_that_trl_and_peft_train_on_the_rounded_weights(
    make_job: MakeJob, tmp_path: Path
) -> None:
    one, reference, other = (
        make_job("alora", max_steps=12, adam_epsilon=1e-4, runs=runs)
        for runs in ("one", "reference", "other")
    )
    reference = on_rounded_weights(reference, tmp_path / "rounded")
    assert_same(
        weights_of(in_4_bits(one)),
        weights(trl.fit(reference, data(reference))),
        weights_of(other),
        0.01,
    )


def test_a_lora_is_the_one_that_trl_and_peft_train_on_the_rounded_weights(
    make_job: MakeJob, tmp_path: Path
) -> None:
    one, reference, other = (
        make_job("lora", max_steps=12, adam_epsilon=1e-4, runs=runs)
        for runs in ("one", "reference", "other")
    )
    reference = on_rounded_weights(reference, tmp_path / "rounded")
    found, expected, otherwise = (
        weights(trl.fit(job, data(job))) for job in (in_4_bits(one), reference, other)
    )
    assert_same(
        found, expected, otherwise, 0.06
    )  # TRL rounds the weights that it starts from to bfloat16


def assert_served(job: Job, model: PeftModel) -> None:
    assert not any(isinstance(module, Linear4bit) for module in model.modules())
    prompt = data(job).test[0].prompt
    (logit,) = verdict_logits(model, [prompt], job.builder)
    bare = load.load_served_base(job.recipe, CPU)(torch.tensor([prompt.token_ids])).logits[0, -1]
    assert (
        abs(float(bare[job.builder.yes_id] - bare[job.builder.no_id]) - logit) > 0.05
    )  # the weights came along


def test_an_alora_stands_on_the_base_that_serves_it_and_so_do_its_verdicts(
    make_job: MakeJob,
) -> None:
    job = in_4_bits(make_job("alora", max_steps=24))
    with trained(job) as fitted:
        prompts = [row.prompt for row in data(job).validation]
        assert fitted.validation_logits == pytest.approx(
            verdict_logits(fitted.model, prompts, job.builder), abs=1e-5
        )
        assert_served(job, fitted.model)


def test_a_lora_stands_on_the_base_that_serves_it(make_job: MakeJob) -> None:
    job = in_4_bits(make_job("lora", max_steps=24))
    assert_served(job, trl.fit(job, data(job)))


def test_an_evaluation_in_between_leaves_the_gradients_true(make_job: MakeJob) -> None:
    job = in_4_bits(make_job())
    model = load.load_base(job.recipe, CPU)
    layer = next(module for module in model.modules() if isinstance(module, Linear4bit))
    x = torch.randn(3, layer.in_features)
    dense = layer(torch.eye(layer.in_features)).detach()  # row i: the weights of input i
    with torch.no_grad():
        layer.eval()(x)
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, dense.sum(1).expand(3, -1), rtol=1e-4, atol=1e-4)


def test_what_cannot_quantise_is_refused_before_any_training(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = in_4_bits(make_job("alora"))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        GuardError, match=r"recipe toy: quantization: this machine cannot train in 4 bits"
    ):
        run.check([job])


def test_another_quantization_makes_an_adapter_outdated(make_job: MakeJob) -> None:
    job = make_job("alora")
    assert in_4_bits(job).inputs != job.inputs
