"""What training on an encoder would fail at or ignore is refused before it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from guard.errors import GuardError
from tests.train.conftest import with_lora, with_settings
from tests.train.encoder.conftest import MakeEncoderJob
from train.encoder.settings import check_adapter


def test_sound_settings_pass(make_encoder_job: MakeEncoderJob) -> None:
    check_adapter(make_encoder_job())


def test_modules_that_the_encoder_has_not_are_refused(make_encoder_job: MakeEncoderJob) -> None:
    with pytest.raises(GuardError, match=r"methods\.lora\.lora: PEFT rejected.*q_proj"):
        check_adapter(with_lora(make_encoder_job(), target_modules=["q_proj"]))


def test_a_window_beyond_the_positions_is_refused(make_encoder_job: MakeEncoderJob) -> None:
    job = make_encoder_job()
    job = type(job)(
        job.rule,
        job.recipe.model_copy(update={"window_tokens": 65}),
        job.method,
        job.seed,
        job.builder,
        job.runs,
    )
    with pytest.raises(GuardError, match=r"window_tokens: .*fewer positions.*At most 64"):
        check_adapter(job)


@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "save_steps"])
def test_a_setting_that_training_would_not_read_is_refused(
    make_encoder_job: MakeEncoderJob, key: str
) -> None:
    with pytest.raises(GuardError, match=f"is trained without '{key}'"):
        check_adapter(make_encoder_job(**{key: 7}))


def test_a_base_in_float16_is_refused(make_encoder_job: MakeEncoderJob) -> None:
    job = make_encoder_job()
    with pytest.raises(GuardError, match=r"without 'fp16'.*bfloat16"):
        check_adapter(replace(job, recipe=job.recipe.model_copy(update={"dtype": "float16"})))


def test_the_settings_of_a_head_are_refused(make_encoder_job: MakeEncoderJob) -> None:
    with pytest.raises(GuardError, match="does not use head settings"):
        check_adapter(with_settings(make_encoder_job(), head={"C": 1.0}))
