"""A recipe's `lora` and `trainer` as PEFT's and TRL's settings, checked. Knows nothing of models, rows or training loops."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from peft import LoraConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, get_scheduler
from trl.trainer.sft_config import SFTConfig

from guard.errors import GuardError
from train.job import Job

# The arguments of LoraConfig that stand for low-rank updates of an unchanged base: vLLM serves nothing else.
SERVED = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout", "init_lora_weights"} | {
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out",
}  # fmt: skip
SERVED_INITS = (
    True,
    False,
    "gaussian",
    "orthogonal",
)  # the others take something out of the base's weights
# What training on cached prefixes reads of the trainer's settings (train/prefix/member.py); anything else would be ignored without a word.
ALORA_READS = {"learning_rate", "weight_decay", "max_grad_norm", "num_train_epochs", "max_steps", "save_steps"} | {
    "per_device_train_batch_size", "gradient_accumulation_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon",
}  # fmt: skip
NOT_OUR_LOSS = (
    "label_smoothing_factor",
    "loss_type",
    "assistant_only_loss",
    "completion_only_loss",
    "use_liger_kernel",
)
LORA_OWNED = {"task_type": "CAUSAL_LM", "alora_invocation_tokens": None, "inference_mode": False}
VLLM_DEFAULT_MAX_RANK = 16

Config = TypeVar("Config", LoraConfig, SFTConfig)


def lora_config(job: Job) -> LoraConfig:
    """The recipe's `lora` as PEFT's LoraConfig; an aLoRA is active from the suffix's header on. Raises GuardError naming a bad key."""
    where = f"recipe '{job.recipe.name}', adapters.{job.method}.lora"
    given = job.lora
    _check_keys(given, LoraConfig, LORA_OWNED, where)
    for key, value in given.items():
        fine = (
            value in SERVED_INITS
            if key == "init_lora_weights"
            else key in SERVED or value == getattr(LoraConfig(), key)
        )
        if not fine:
            raise GuardError(
                f"'{key}' could not be served with this value",
                where=where,
                got=value,
                remedy="Remove it",
            )
    limit = job.recipe.engine.get("max_lora_rank", VLLM_DEFAULT_MAX_RANK)
    with refusals("LoraConfig", where):
        rank = max([given.get("r", 8), *given.get("rank_pattern", {}).values()])
        is_served = rank <= limit
    if not is_served:
        what, remedy = (
            "the rank is above the engine's max_lora_rank: the adapter could not be served",
            "Lower r, or raise max_lora_rank",
        )
        raise GuardError(what, where=where, got=f"{rank} > {limit}", remedy=remedy)
    owned = LORA_OWNED | (
        {"alora_invocation_tokens": list(job.builder.invocation(job.rule_text))}
        if job.method == "alora"
        else {}
    )
    return _construct(LoraConfig, given | owned, where)


def trainer_config(job: Job) -> SFTConfig:
    """The recipe's `trainer` as TRL's SFTConfig, checkpoints in the job's scratch folder.

    Raises GuardError naming a key that is bad or that an aLoRA would be trained without, or the package that the optimizer needs.
    """
    owned = _trainer_owned(job)
    defaults = {
        "save_steps": 50,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    recipe, own = f"recipe '{job.recipe.name}'", f"adapters.{job.method}.trainer"
    _check_keys(job.recipe.trainer, SFTConfig, owned, f"{recipe}, trainer")
    _check_keys(job.recipe.methods[job.method].trainer, SFTConfig, owned, f"{recipe}, {own}")
    where = f"{recipe}, trainer and {own}"
    config = _construct(SFTConfig, defaults | job.trainer | owned, where)
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"):
        with refusals("SFTConfig", where):
            is_fine = getattr(config, key) > 0
        if not is_fine:
            raise GuardError(
                f"'{key}' must be above 0",
                where=where,
                got=getattr(config, key),
                remedy="Raise it or remove it",
            )
    optimizer_of(config, [torch.nn.Parameter(torch.zeros(1))], 1, where)
    usual = SFTConfig(**defaults | owned)
    for key, value in job.trainer.items():
        is_lora_only = job.method == "alora" and key not in ALORA_READS
        if (is_lora_only or key in NOT_OUR_LOSS) and value != getattr(usual, key):
            remedy = (
                "State it in adapters.lora.trainer alone"
                if is_lora_only and key not in NOT_OUR_LOSS
                else "Remove it"
            )
            raise GuardError(
                f"{_a(job.method)} is trained without '{key}'",
                where=where,
                got=value,
                remedy=remedy,
            )
    if job.method == "alora" and config.fp16:
        remedy = "Set the recipe's dtype to bfloat16 or float32"
        raise GuardError("an aLoRA is trained without 'fp16'", where=where, remedy=remedy)
    return config


def optimizer_of(
    config: SFTConfig, weights: Sequence[torch.nn.Parameter], steps: int, where: str
) -> tuple[Optimizer, LRScheduler]:
    """The recipe's optimizer of `weights` and its schedule over `steps`. Raises GuardError naming what they refuse."""
    with refusals("the trainer's optimizer or schedule", where):
        kind, arguments = Trainer.get_optimizer_cls_and_kwargs(config)
        optimizer = kind([{"params": weights, "weight_decay": config.weight_decay}], **arguments)
        more = cast(dict[str, object], config.lr_scheduler_kwargs or {})
        warmup = config.get_warmup_steps(steps)
        return optimizer, get_scheduler(
            config.lr_scheduler_type, optimizer, warmup, steps, scheduler_specific_kwargs=more
        )


def _a(method: str) -> str:
    return {"lora": "a LoRA", "alora": "an aLoRA"}[method]


def _trainer_owned(job: Job) -> dict[str, Any]:
    return {
        "output_dir": str(job.scratch),
        "seed": job.seed,
        "data_seed": job.seed,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": job.recipe.dtype == "bfloat16",
        "fp16": job.recipe.dtype == "float16",
        "report_to": "none",
        "run_name": job.name,
        "disable_tqdm": True,  # one bar of our own instead
        "remove_unused_columns": False,
        "dataset_kwargs": {
            "skip_prepare_dataset": True
        },  # already tokens; text is never tokenised here
        "max_length": None,
        "packing": False,  # only the last invocation of a row is activated
        "padding_free": False,
        "train_sampling_strategy": "group_by_length",
        "dataloader_drop_last": False,
        "logging_strategy": "steps",
        "logging_steps": 1,  # the loss of each step, for an epoch's mean
        "save_strategy": "steps",
        "save_total_limit": 1,
        "resume_from_checkpoint": None,
        "push_to_hub": False,
    }


def steps_per_epoch(config: SFTConfig, rows: int) -> int:
    """Optimizer steps in which `rows` are read once."""
    return math.ceil(
        rows / (config.per_device_train_batch_size * config.gradient_accumulation_steps)
    )


def _check_keys(given: dict[str, Any], config: type, owned: dict[str, Any], where: str) -> None:
    known = {field.name for field in dataclasses.fields(config) if field.init}
    for key in given:
        if key in owned:
            raise GuardError(
                f"'{key}' is set by the training stage itself", where=where, remedy="Remove it"
            )
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            remedy = (
                f"Did you mean '{near[0]}'?"
                if near
                else f"See {config.__name__} of {config.__module__.partition('.')[0]}"
            )
            raise GuardError(
                f"unknown key '{key}' for {config.__name__}", where=where, remedy=remedy
            )


def _construct(config: type[Config], arguments: dict[str, Any], where: str) -> Config:
    with refusals(config.__name__, where):
        return config(**arguments)


@contextmanager
def refusals(what: str, where: str) -> Iterator[None]:
    """What a library raises for values that it cannot use, as a GuardError."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        raise GuardError(
            f"{what} refuses its values: {error}", where=where, remedy="Correct them in the recipe"
        ) from error
