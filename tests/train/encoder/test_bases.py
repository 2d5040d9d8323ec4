"""What is refused before training on an encoder starts."""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from guard.errors import GuardError
from guard.recipe import KINDS, load_recipe
from serve.engine.backends.arguments import ENCODERS
from tests.train.conftest import MakeEncoderJob, with_recipe, with_settings
from train.encoder.settings import SENTENCE_FILES, check_adapter
from train.job import Job
from train.methods import TRAINERS, trainer_of

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
    for kind in (transformers.RobertaConfig, transformers.XLMRobertaConfig):
        kind(**SMALL, pad_token_id=1).save_pretrained(tmp_path / kind.model_type)
        check_windows(job, tmp_path / kind.model_type, 62)
    for length, usable in ((40, 40), (100, 64)):
        base = tmp_path / str(length)
        transformers.BertConfig(**SMALL).save_pretrained(base)
        stated = {"max_seq_length": length, "do_lower_case": False}
        (base / "sentence_bert_config.json").write_text(json.dumps(stated))
        check_windows(job, base, usable)
    trainer_of(job).check(replace(job, recipe=load_recipe("minilm")))


def test_the_files_of_sentence_encoders_are_those_that_vllm_reads() -> None:
    file = Path(sysconfig.get_path("platlib"), "vllm", "transformers_utils", "config.py")
    source = file.read_text(encoding="utf-8")
    assert tuple(re.findall(r'"(sentence_\S+_config\.json)"', source)) == SENTENCE_FILES


@pytest.mark.parametrize("method", CHECKS)
@pytest.mark.parametrize(
    "kind",
    [transformers.CamembertConfig, transformers.DebertaV2Config, transformers.DistilBertConfig],
)
def test_an_encoder_of_a_type_that_is_not_served_is_not_trained(
    make_encoder_job: MakeEncoderJob,
    tmp_path: Path,
    kind: type[transformers.PreTrainedConfig],
    method: str,
) -> None:
    kind(max_position_embeddings=64).save_pretrained(tmp_path / "base")
    job = on(make_encoder_job(method), tmp_path / "base", 32)
    told = rf"recipe toy: base: .*got {kind.model_type}.*bert, roberta, .*docs/recipes"
    with pytest.raises(GuardError, match=told):
        trainer_of(job).check(job)


def test_types_are_trained_as_far_as_served() -> None:
    assert set(KINDS["encoder"].model_types) == set(ENCODERS)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda make: make(gradient_accumulation_steps=7), "without 'gradient_accumulation_steps'"),
        (lambda make: make(save_steps=7), "is trained without 'save_steps'"),
        (lambda make: with_recipe(make(), dtype="float16"), r"without 'fp16'.*bfloat16"),
        (lambda make: with_settings(make(), head={"C": 1.0}), "use head settings"),
    ],
)
def test_settings_that_training_would_not_read_or_fail_at_are_refused(
    make_encoder_job: MakeEncoderJob, change: Callable[[MakeEncoderJob], Job], told: str
) -> None:
    check_adapter(make_encoder_job())
    with pytest.raises(GuardError, match=told):
        check_adapter(change(make_encoder_job))
