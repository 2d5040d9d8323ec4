"""What training on an encoder would fail at or ignore is refused before it starts."""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BertConfig,
    CamembertConfig,
    DistilBertConfig,
    ElectraConfig,
    PreTrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from guard.errors import GuardError
from guard.recipe import KINDS, Kind, load_recipe
from serve.engine.backends.arguments import ENCODERS
from tests.train.conftest import MakeEncoderJob, with_lora, with_settings
from train.encoder.settings import SENTENCE_FILES, check_adapter
from train.job import Job
from train.methods import TRAINERS, trainer_of

CHECKS = tuple(TRAINERS["encoder"])
SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def on(job: Job, base: Path, window: int) -> Job:
    """The job on another base, in windows of so many tokens."""
    update = {"base": str(base), "window_tokens": window}
    return replace(job, recipe=job.recipe.model_copy(update=update))


@pytest.mark.parametrize("method", CHECKS)
def test_windows_beyond_positions_stop(make_encoder_job: MakeEncoderJob, method: str) -> None:
    job = make_encoder_job(method)
    base = Path(job.recipe.base)
    trainer_of(job).check(on(job, base, 64))
    with pytest.raises(GuardError, match=r"window_tokens: .*fewer positions.*At most 64"):
        trainer_of(job).check(on(job, base, 65))


@pytest.mark.parametrize("method", CHECKS)
@pytest.mark.parametrize("kind", [RobertaConfig, XLMRobertaConfig])
def test_the_positions_that_a_roberta_does_not_use_are_not_read_in(
    make_encoder_job: MakeEncoderJob, tmp_path: Path, kind: type[RobertaConfig], method: str
) -> None:
    job = make_encoder_job(method)
    kind(**SMALL, pad_token_id=1).save_pretrained(tmp_path / "base")
    trainer_of(job).check(on(job, tmp_path / "base", 62))
    with pytest.raises(GuardError, match=r"window_tokens: .*got 63.*At most 62"):
        trainer_of(job).check(on(job, tmp_path / "base", 63))


@pytest.mark.parametrize("method", CHECKS)
@pytest.mark.parametrize(("length", "usable"), [(40, 40), (100, 64)])
def test_a_sentence_encoder_is_read_as_far_as_it_says_that_it_was_trained(
    make_encoder_job: MakeEncoderJob, tmp_path: Path, length: int, usable: int, method: str
) -> None:
    """vLLM refuses a longer window."""
    job = make_encoder_job(method)
    BertConfig(**SMALL).save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "sentence_bert_config.json"
    file.write_text(json.dumps({"max_seq_length": length, "do_lower_case": False}))
    trainer_of(job).check(on(job, tmp_path / "base", usable))
    with pytest.raises(GuardError, match=rf"window_tokens: .*At most {usable}$"):
        trainer_of(job).check(on(job, tmp_path / "base", usable + 1))


def test_the_files_of_sentence_encoders_are_those_that_vllm_reads() -> None:
    file = Path(sysconfig.get_path("platlib"), "vllm", "transformers_utils", "config.py")
    source = file.read_text(encoding="utf-8")
    assert tuple(re.findall(r'"(sentence_\S+_config\.json)"', source)) == SENTENCE_FILES


def test_minilm_s_windows_are_no_longer_than_vllm_s(make_encoder_job: MakeEncoderJob) -> None:
    minilm = load_recipe("minilm")
    for method in CHECKS:
        job = replace(make_encoder_job(method), recipe=minilm)
        trainer_of(job).check(job)
        with pytest.raises(GuardError, match=r"window_tokens: .*At most 256"):
            trainer_of(job).check(on(job, Path(minilm.base_path), 512))


@pytest.mark.parametrize("method", CHECKS)
@pytest.mark.parametrize("kind", [CamembertConfig, ElectraConfig, DistilBertConfig])
def test_an_encoder_of_a_type_that_is_not_served_is_not_trained(
    make_encoder_job: MakeEncoderJob, tmp_path: Path, kind: type[PreTrainedConfig], method: str
) -> None:
    job = make_encoder_job(method)
    kind(max_position_embeddings=64).save_pretrained(tmp_path / "base")
    told = rf"recipe toy: base: .*got {kind.model_type}.*bert, deberta-v2, .*serve/vllm_encoder"
    with pytest.raises(GuardError, match=told):
        trainer_of(job).check(on(job, tmp_path / "base", 32))


@pytest.mark.parametrize("kind", ["encoder", "gliner2"])
def test_types_are_trained_as_far_as_served(kind: Kind, make_encoder_job: MakeEncoderJob) -> None:
    served = set(ENCODERS) if kind == "encoder" else {"deberta-v2"}
    assert set(KINDS[kind].model_types) == served
    recipe = make_encoder_job().recipe.model_copy(update={"kind": kind})
    for model_type in served:
        recipe.check_model_type(model_type)
    with pytest.raises(GuardError, match=r"got electra.*ENCODERS in serve/engine/backends/arg"):
        recipe.check_model_type("electra")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda make: make(gradient_accumulation_steps=7), "without 'gradient_accumulation_steps'"),
        (lambda make: make(save_steps=7), "is trained without 'save_steps'"),
        (lambda make: in_float16(make()), r"without 'fp16'.*bfloat16"),
        (lambda make: with_settings(make(), head={"C": 1.0}), "does not use head settings"),
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


def in_float16(job: Job) -> Job:
    return replace(job, recipe=job.recipe.model_copy(update={"dtype": "float16"}))
