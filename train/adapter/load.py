"""Bases as adapters are trained and served on them, frozen. Knows nothing of rows or training loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from guard.recipe import Recipe
from train.adapter import quantised
from train.adapter.settings import lora_config, refusals, trainer_config
from train.job import Job


def load_base(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """The base that adapters are trained on, frozen on `device`: the one they are served on, or that in the recipe's quantization."""
    if not recipe.quantization:
        return load_served_base(recipe, device)
    dtype = getattr(torch, recipe.dtype)
    model = AutoModelForCausalLM.from_pretrained(
        recipe.base_path, dtype=dtype, **pinned(recipe), **quantised.loading(recipe, device)
    )
    quantised.keep_trainable(model)
    return cast(PreTrainedModel, model.eval().requires_grad_(False))


def load_served_base(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """The base that adapters are served on, frozen on `device`."""
    loaded = AutoModelForCausalLM.from_pretrained(
        recipe.base_path, dtype=getattr(torch, recipe.dtype), **pinned(recipe)
    )
    return cast(
        PreTrainedModel, cast(torch.nn.Module, loaded).to(device).eval().requires_grad_(False)
    )


def try_on(job: Job) -> None:
    """Put the job's fresh adapter on its base without weights. Raises GuardError for modules that the base does not have, or for a
    quantization that this machine cannot train in."""
    if job.recipe.quantization:
        quantised.check(job.recipe, trainer_config(job).device)
    config = AutoConfig.from_pretrained(job.recipe.base_path, **pinned(job.recipe))
    with (
        torch.device("meta"),
        refusals("PEFT", f"recipe '{job.recipe.name}', adapters.{job.method}.lora"),
    ):
        get_peft_model(AutoModelForCausalLM.from_config(config), lora_config(job))


def pinned(recipe: Recipe) -> dict[str, Any]:
    """The arguments that make `from_pretrained` load the base's commit, and a local one without a network."""
    return {"revision": recipe.commit, "local_files_only": Path(recipe.base_path).is_dir()}
