"""Bases as adapters are trained on them, frozen. Knows nothing of rows or training loops.

Thresholds and test verdicts are made on the base that answers (`load_served_base`), which may be
another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from guard.errors import GuardError
from guard.method import METHODS
from guard.recipe import Recipe
from train.adapter.reader import check_reader
from train.adapter.settings import lora_config, trainer_config
from train.base import check_4_bits, load_base_in, pinned, refusals
from train.head.fit import check_fit_settings
from train.job import Job


def load_base(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """The base that adapters are trained on, frozen on `device`."""
    return load_base_in(recipe.quantization, recipe, device)


def check_adapter(job: Job) -> None:
    """Construct the job's settings, and put its fresh adapter on its base without weights. Raises
    GuardError for settings that PEFT, TRL or the engine would refuse, for modules that the base
    does not have, and for a quantization that this machine cannot train in.
    """
    adapter, device = checked_settings(job)
    if "nf4" in (job.recipe.quantization, job.recipe.serving_quantization):
        check_4_bits(job.recipe, device)
    base = AutoConfig.from_pretrained(job.recipe.base_path, **pinned(job.recipe))
    check_modules(job, adapter, base, AutoModelForCausalLM.from_config)
    if job.recipe.reader is not None:
        check_reader(job, adapter)


def checked_settings(job: Job) -> tuple[LoraConfig, torch.device]:
    """The job's adapter and the device of its training. Raises GuardError for bad settings."""
    if job.settings.head is not None:
        if job.recipe.is_encoder or not METHODS[job.method].shares_conversation:
            problem = "only an aLoRA and a method that is a head use head settings"
            raise GuardError(problem, where=job.where("head"), remedy="Remove them")
        check_fit_settings(job)
    return lora_config(job), trainer_config(job).device


def check_modules(
    job: Job,
    adapter: LoraConfig,
    base: PreTrainedConfig,
    empty: Callable[[PreTrainedConfig], nn.Module],
) -> None:
    """Put the adapter on an `empty` model of the base's shape, without memory for weights. Raises
    GuardError where PEFT refuses.
    """
    with torch.device("meta"), refusals("PEFT", job.where("lora")):
        model: Any = empty(base)
        get_peft_model(model, adapter)
