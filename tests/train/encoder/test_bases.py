"""What adapters on encoders start from, and what is refused before their training starts.

A rule's adapter on GLiNER2 begins as the base, learns, and loads in the package gliner2 with plain
PEFT. `test_trainer.py` has what it shares with other encoders.
"""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    CamembertConfig,
    DistilBertConfig,
    ElectraConfig,
    PreTrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from guard.conversation.example import read_examples
from guard.errors import GuardError
from guard.layout import Runs
from guard.prompt.gliner2 import Gliner2PromptBuilder
from guard.recipe import KINDS, load_recipe
from serve.engine.backends.arguments import ENCODERS
from tests.gliner2_toy import adapted, gliner2_recipe, reference_logit, save_base
from tests.train.conftest import (
    RULE,
    MakeEncoderJob,
    data,
    mostly_generated,
    with_lora,
    with_recipe,
    with_settings,
    write_toy_data,
)
from train.encoder.bases import gliner2_config, load_gliner2
from train.encoder.settings import SENTENCE_FILES, check_adapter
from train.encoder.trained import TrainedEncoder, with_head_of_own_rows
from train.encoder.trainer import fit
from train.job import Job
from train.methods import TRAINERS, trainer_of


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
    lost = trained(job_on(base, tmp_path / "lost", learning_rate=10.0, max_steps=2, eval_steps=2))
    np.testing.assert_allclose(lost.logits(tests), expected(job, None), atol=1e-5)


def test_bad_settings_and_too_long_a_rule_are_refused(base: Path, tmp_path: Path) -> None:
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


CHECKS = tuple(TRAINERS["encoder"])
SMALL: dict[str, Any] = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}


def on(job: Job, base: Path, window: int) -> Job:
    """The job on another base, in windows of so many tokens."""
    return with_recipe(job, base=str(base), window_tokens=window)


def check_windows(job: Job, base: Path, usable: int) -> None:
    """Windows of so many tokens pass, and one token more does not."""
    trainer_of(job).check(on(job, base, usable))
    told = rf"window_tokens: .*fewer positions.*got {usable + 1}.*At most {usable}$"
    with pytest.raises(GuardError, match=told):
        trainer_of(job).check(on(job, base, usable + 1))


@pytest.mark.parametrize("method", CHECKS)
def test_windows_beyond_positions_stop(
    make_encoder_job: MakeEncoderJob, tmp_path: Path, method: str
) -> None:
    """A RoBERTa does not use two of its positions. A sentence encoder is read as far as it says
    that it was trained: vLLM refuses a longer window.
    """
    job = make_encoder_job(method)
    check_windows(job, Path(job.recipe.base), 64)
    for kind in (RobertaConfig, XLMRobertaConfig):
        kind(**SMALL, pad_token_id=1).save_pretrained(tmp_path / kind.model_type)
        check_windows(job, tmp_path / kind.model_type, 62)
    for length, usable in ((40, 40), (100, 64)):
        base = tmp_path / str(length)
        BertConfig(**SMALL).save_pretrained(base)
        stated = {"max_seq_length": length, "do_lower_case": False}
        (base / "sentence_bert_config.json").write_text(json.dumps(stated))
        check_windows(job, base, usable)
    trainer_of(job).check(replace(job, recipe=load_recipe("minilm")))


def test_the_files_of_sentence_encoders_are_those_that_vllm_reads() -> None:
    file = Path(sysconfig.get_path("platlib"), "vllm", "transformers_utils", "config.py")
    source = file.read_text(encoding="utf-8")
    assert tuple(re.findall(r'"(sentence_\S+_config\.json)"', source)) == SENTENCE_FILES


@pytest.mark.parametrize("method", CHECKS)
@pytest.mark.parametrize("kind", [CamembertConfig, ElectraConfig, DistilBertConfig])
def test_an_encoder_of_a_type_that_is_not_served_is_not_trained(
    make_encoder_job: MakeEncoderJob, tmp_path: Path, kind: type[PreTrainedConfig], method: str
) -> None:
    kind(max_position_embeddings=64).save_pretrained(tmp_path / "base")
    job = on(make_encoder_job(method), tmp_path / "base", 32)
    told = rf"recipe toy: base: .*got {kind.model_type}.*bert, deberta-v2, .*docs/recipes"
    with pytest.raises(GuardError, match=told):
        trainer_of(job).check(job)


def test_types_are_trained_as_far_as_served() -> None:
    assert set(KINDS["encoder"].model_types) == set(ENCODERS)
    assert KINDS["gliner2"].model_types == ("deberta-v2",)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda make: make(gradient_accumulation_steps=7), "without 'gradient_accumulation_steps'"),
        (lambda make: make(save_steps=7), "is trained without 'save_steps'"),
        (lambda make: with_recipe(make(), dtype="float16"), r"without 'fp16'.*bfloat16"),
        (lambda make: with_settings(make(), head={"C": 1.0}), "use head settings"),
        (
            lambda make: with_lora(make(), target_modules=["q_proj"]),
            r"methods\.lora\.lora: PEFT rejected.*q_proj",
        ),
    ],
)
def test_settings_that_training_would_not_read_or_fail_at_are_refused(
    make_encoder_job: MakeEncoderJob, change: Callable[[MakeEncoderJob], Job], told: str
) -> None:
    check_adapter(make_encoder_job())
    with pytest.raises(GuardError, match=told):
        check_adapter(change(make_encoder_job))
