"""Bases as adapters are trained on them, frozen. Knows nothing of rows or training loops.

With a recipe's `quantization` a base is in 4 bits for training alone (QLoRA, Dettmers et al., 2023,
arXiv 2305.14314): its adapter is served on the base as it is, so thresholds and test verdicts are
made there too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from guard.errors import GuardError
from guard.method import METHODS
from guard.recipe import Recipe
from train.adapter.reader import check_reader
from train.adapter.settings import lora_config, trainer_config
from train.base import frozen, load_served_base, pinned, refusals
from train.head.fit import check_fit_settings
from train.job import Job


def load_base(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """The base that adapters are trained on, frozen on `device`: the one that they are served on,
    or that one in the recipe's quantization.
    """
    if not recipe.quantization:
        return load_served_base(recipe, device)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=recipe.quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, recipe.dtype),
    )
    check_quantization(recipe, device)
    model = AutoModelForCausalLM.from_pretrained(
        recipe.base_path,
        dtype=getattr(torch, recipe.dtype),
        quantization_config=config,
        device_map={"": device},
        **pinned(recipe),
    )
    for module in model.modules():
        # Else bitsandbytes packs weights for inference on a CPU in eval mode, and a product with
        # packed ones has no gradient.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return frozen(model)


def check_adapter(job: Job) -> None:
    """Construct the job's settings, and put its fresh adapter on its base without weights. Raises
    GuardError for settings that PEFT, TRL or the engine would refuse, for modules that the base
    does not have, and for a quantization that this machine cannot train in.
    """
    adapter, device = checked_settings(job)
    if job.recipe.quantization:
        check_quantization(job.recipe, device)
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


def check_quantization(recipe: Recipe, device: torch.device) -> None:
    """Raise GuardError where bitsandbytes is not there, or cannot quantise on this device."""
    try:
        import bitsandbytes

        weights = torch.ones(64, 64, device=device)
        bitsandbytes.functional.quantize_4bit(weights, quant_type=recipe.quantization)
    except (ImportError, RuntimeError, NotImplementedError, AttributeError) as error:
        problem = f"this machine cannot train in 4 bits: {error}"
        where = f"recipe {recipe.name}: quantization"
        got = recipe.quantization
        remedy = "Remove the key, or install a build of bitsandbytes for this machine"
        raise GuardError(problem, where=where, got=got, remedy=remedy) from error
