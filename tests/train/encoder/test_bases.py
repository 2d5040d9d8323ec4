"""A rule's adapter on GLiNER2: it begins as the base, learns, and loads in the package gliner2 with
plain PEFT. `test_trainer.py` has what it shares with other encoders.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from guard.conversation.example import read_examples
from guard.errors import GuardError
from guard.layout import Runs
from guard.prompt.gliner2 import Gliner2PromptBuilder
from tests.gliner2_toy import adapted, gliner2_recipe, reference_logit, save_base
from tests.train.conftest import RULE, data, mostly_generated, with_lora, write_toy_data
from train.encoder.bases import gliner2_config, load_gliner2
from train.encoder.settings import check_adapter
from train.encoder.trained import TrainedEncoder, with_head_of_own_rows
from train.encoder.trainer import fit
from train.job import Job


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("gliner2"))


def job_on(
    base: Path, root: Path, *, seed: int = 0, learning_rate: float = 1e-2, **trainer: object
) -> Job:
    recipe = gliner2_recipe(base)
    method = recipe.methods["lora"].model_copy(update={"trainer": {"learning_rate": learning_rate}})
    replaced = {"trainer": recipe.trainer | trainer, "methods": {"lora": method}}
    recipe = recipe.model_copy(update=replaced)
    job = Job(RULE, recipe, "lora", seed, Gliner2PromptBuilder.of(recipe), Runs(root / "runs"))
    if not job.data.exists():
        write_toy_data(job.data)
    return job


def trained(job: Job) -> TrainedEncoder:
    (adapter,) = fit([(job, data(job))])
    assert isinstance(adapter, TrainedEncoder), adapter
    return adapter


def expected(job: Job, folder: Path | None) -> list[float]:
    """What gliner2 says of the test rows, with the adapter in `folder` or without."""
    model, builder = adapted(folder), cast(Gliner2PromptBuilder, job.builder)
    return [
        reference_logit(model, builder, example.messages, job.rule_text)
        for example in read_examples(job.data / "test.jsonl")
    ]


@pytest.mark.slow
def test_gliner2_with_plain_peft_says_the_same(base: Path, tmp_path: Path) -> None:
    """Own rows and generated ones are one training: there is no head to be fitted again."""
    job = job_on(base, tmp_path)
    adapter, rows = trained(job), data(job)
    mixed = mostly_generated(rows, own_training=32, own_validation=16)
    assert with_head_of_own_rows(adapter, mixed) is adapter
    adapter.save(tmp_path / "adapter")
    tests = [row.prompt for row in rows.test]
    logits = adapter.logits(tests)
    np.testing.assert_allclose(logits, expected(job, tmp_path / "adapter"), atol=1e-5)
    assert np.abs(np.array(logits) - expected(job, None)).max() > 0.1
    # With a learning rate that destroys, the weights before the first step are kept.
    destroyed = trained(job_on(base, tmp_path / "destroyed", learning_rate=10.0))
    np.testing.assert_allclose(destroyed.logits(tests), expected(job, None), atol=1e-5)


def test_bad_settings_and_a_rule_too_long_for_a_window_are_refused(
    base: Path, tmp_path: Path
) -> None:
    job = job_on(base, tmp_path)
    check_adapter(job)
    with pytest.raises(GuardError, match=r"methods\.lora\.lora: PEFT rejected.*q_proj"):
        check_adapter(with_lora(job, target_modules=["q_proj"]))
    long = RULE.model_copy(update={"title": "no " * 50})
    with pytest.raises(GuardError, match="too little of a window"):
        data(replace(job, rule=long))


def test_other_weights_are_refused(tmp_path: Path) -> None:
    """Those of another shape, those that lack a layer, and none at all."""
    file = save_base(tmp_path) / "model.safetensors"
    recipe, tensors = gliner2_recipe(tmp_path), load_file(file)
    config = gliner2_config(recipe)
    assert config.model_type == "deberta-v2" and config.hidden_size == 64
    lacking = {k: v for k, v in tensors.items() if not k.startswith("classifier")}
    of_another_shape = tensors | {"classifier.2.weight": torch.zeros(2, 128)}
    for content, told in ((lacking, r"no classifier\.0"), (of_another_shape, "size mismatch")):
        save_file(content, file)
        with pytest.raises(GuardError, match=rf"not those of a GLiNER2: .*{told}"):
            load_gliner2(recipe)
    file.unlink()
    with pytest.raises(GuardError, match=r"model\.safetensors.*Download it"):
        load_gliner2(recipe)
