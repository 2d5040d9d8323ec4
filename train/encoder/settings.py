"""Checks the settings of a LoRA on an encoder. Knows nothing of rows or training loops."""

from __future__ import annotations

from typing import cast

import torch
from peft import get_peft_model
from transformers import PreTrainedModel

from guard.errors import GuardError
from train.adapter.settings import lora_config, trainer_config
from train.encoder.bases import BASES
from train.job import Job
from train.refusals import refusals


def check_adapter(job: Job) -> None:
    """Construct the job's settings, and put its fresh adapter on its base without weights.

    Raises GuardError for settings that PEFT or the trainer would refuse, for modules that the base
    does not have, for a window that it has no positions for, and for a rule that fits no prompt.
    """
    if job.settings.head:
        problem = "an adapter does not use head settings"
        raise GuardError(problem, where=job.where("head"), remedy="Remove them")
    adapter = lora_config(job)
    trainer_config(job)
    job.builder.suffix_ids(job.rule_text)
    base = BASES[job.recipe.kind]
    config = base.config(job.recipe)
    _check_positions(job, config.max_position_embeddings)
    with torch.device("meta"), refusals("PEFT", job.where("lora")):
        get_peft_model(cast(PreTrainedModel, base.empty(config)), adapter)


def _check_positions(job: Job, positions: int) -> None:
    window = job.recipe.window_tokens
    if window is None or window > positions:
        raise GuardError(
            "the encoder has fewer positions than a window has tokens",
            where=f"recipe {job.recipe.name}: window_tokens",
            got=window,
            remedy=f"At most {positions}",
        )
