"""Bases as adapters are trained on them, frozen.

Knows nothing of rows or training loops.
"""

from __future__ import annotations

import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from guard.errors import GuardError
from guard.recipe import Recipe
from train.adapter import quantised
from train.adapter.settings import lora_config, trainer_config
from train.base import frozen, load_served_base, pinned
from train.job import Job
from train.refusals import refusals


def load_base(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """The base that adapters are trained on, frozen on `device`.

    It is the one that they are served on, or that one in the recipe's quantization.
    """
    if not recipe.quantization:
        return load_served_base(recipe, device)
    model = AutoModelForCausalLM.from_pretrained(
        recipe.base_path,
        dtype=getattr(torch, recipe.dtype),
        **pinned(recipe),
        **quantised.loading(recipe, device),
    )
    quantised.keep_trainable(model)
    return frozen(model)


def check_adapter(job: Job) -> None:
    """Construct the job's settings, and put its fresh adapter on its base without weights.

    Raises GuardError for settings that PEFT, TRL or the engine would refuse, for modules that the
    base does not have, and for a quantization that this machine cannot train in.
    """
    if job.settings.head:
        problem = "an adapter does not use head settings"
        raise GuardError(problem, where=job.where("head"), remedy="Remove them")
    adapter = lora_config(job)
    device = trainer_config(job).device
    if job.recipe.quantization:
        quantised.check(job.recipe, device)
    base = AutoConfig.from_pretrained(job.recipe.base_path, **pinned(job.recipe))
    with torch.device("meta"), refusals("PEFT", job.where("lora")):
        get_peft_model(AutoModelForCausalLM.from_config(base), adapter)
