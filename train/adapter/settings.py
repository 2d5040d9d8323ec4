"""A recipe's `lora` and `trainer` as PEFT's and TRL's settings, checked. Knows nothing of models,
rows or training loops.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from peft import LoraConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, get_scheduler
from trl.trainer.sft_config import SFTConfig

from guard.errors import GuardError, did_you_mean
from guard.method import METHODS
from guard.recipe import Kind
from train.base import refusals
from train.job import Job

# The arguments of LoraConfig that stand for low-rank updates of an unchanged base: vLLM serves
# nothing else.
SERVED = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout"),
    *("init_lora_weights", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "fan_in_fan_out"),
}
# The other initialisations change the base's weights.
SERVED_INITS = (True, False, "gaussian", "orthogonal")
# What training on cached prefixes reads of the trainer's settings (train/prefix/member.py); any
# other setting would be ignored silently.
ALORA_READS = {
    *("learning_rate", "weight_decay", "max_grad_norm", "num_train_epochs", "max_steps"),
    *("save_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args"),
    *("adam_beta1", "adam_beta2", "adam_epsilon"),
}
# What training on an encoder reads of the trainer's settings (train/encoder/trainer.py).
ENCODER_READS = (ALORA_READS | {"eval_steps"}) - {"save_steps", "gradient_accumulation_steps"}
NOT_OUR_LOSS = (
    *("label_smoothing_factor", "loss_type", "assistant_only_loss", "completion_only_loss"),
    *("use_liger_kernel",),
)
POSITIVE = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    "eval_steps",
)
# Schedules that need a metric, which training does not give them.
OF_A_METRIC = ("reduce_lr_on_plateau", "greedy")
LORA_OWNED = {"task_type": None, "alora_invocation_tokens": None, "inference_mode": False}
# What PEFT calls the model that an adapter of each kind of base makes of it. A token classifier has
# a head, which PEFT trains and saves with the adapter.
TASKS: dict[Kind, str] = {"decoder": "CAUSAL_LM", "encoder": "TOKEN_CLS"}


def lora_config(job: Job) -> LoraConfig:
    """The recipe's `lora` as PEFT's LoraConfig; an aLoRA is active from the suffix's header on.
    Raises GuardError naming a bad key.
    """
    where = job.where("lora")
    _check_keys(job.settings.lora, LoraConfig, LORA_OWNED, where)
    _check_served(job.settings.lora, where)
    _check_rank(job, where)
    owned: dict[str, Any] = LORA_OWNED | {"task_type": TASKS[job.recipe.kind]}
    if _acts_from_suffix(job):
        owned["alora_invocation_tokens"] = list(job.builder.invocation(job.rule_text))
    with refusals("LoraConfig", where):
        return LoraConfig(**job.settings.lora | owned)


def trainer_config(job: Job) -> SFTConfig:
    """The recipe's `trainer` as TRL's SFTConfig, checkpoints in the job's scratch folder. Raises
    GuardError naming a key that is bad or that the method would be trained without, or the package
    that the optimizer needs.
    """
    owned = _trainer_owned(job)
    defaults = {
        "save_steps": 50,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    recipe = f"recipe {job.recipe.name}"
    section = f"methods.{job.method}.trainer"
    _check_keys(job.recipe.trainer, SFTConfig, owned, f"{recipe}: trainer")
    _check_keys(job.settings.trainer, SFTConfig, owned, f"{recipe}: {section}")
    where = f"{recipe}: trainer and {section}"
    schedule = job.trainer.get("lr_scheduler_type")
    if schedule in OF_A_METRIC:
        problem = "a schedule that needs a metric, which training does not give it"
        remedy = "Take another lr_scheduler_type, such as cosine"
        raise GuardError(problem, where=where, got=schedule, remedy=remedy)
    with refusals("SFTConfig", where):
        config = SFTConfig(**defaults | job.trainer | owned)
    _check_range(config, where)
    if job.min_steps and config.max_steps > 0:
        problem = "training would take max_steps, whatever min_steps says"
        got = f"{job.min_steps} beside max_steps {config.max_steps}"
        remedy = "Remove one of them"
        raise GuardError(problem, where=job.where("min_steps"), got=got, remedy=remedy)
    optimizer_of(config, [torch.nn.Parameter(torch.zeros(1))], 1, where)
    _check_read(job, SFTConfig(**defaults | owned), where)
    if config.fp16 and (_acts_from_suffix(job) or job.recipe.is_encoder):
        remedy = "Set the recipe's dtype to bfloat16 or float32"
        raise GuardError(_is_trained_without(job, "fp16"), where=where, remedy=remedy)
    return config


def optimizer_of(
    config: SFTConfig, weights: Sequence[torch.nn.Parameter], steps: int, where: str
) -> tuple[Optimizer, LRScheduler]:
    """The recipe's optimizer of `weights` and schedule over `steps`. Refusals are GuardErrors."""
    with refusals("the trainer's optimizer or schedule", where):
        kind, arguments = Trainer.get_optimizer_cls_and_kwargs(config)
        optimizer = kind([{"params": weights, "weight_decay": config.weight_decay}], **arguments)
        schedule = get_scheduler(
            config.lr_scheduler_type,
            optimizer,
            config.get_warmup_steps(steps),
            steps,
            scheduler_specific_kwargs=cast(dict[str, object], config.lr_scheduler_kwargs or {}),
        )
    return optimizer, schedule


def steps_per_epoch(config: SFTConfig, rows: int) -> int:
    return math.ceil(
        rows / (config.per_device_train_batch_size * config.gradient_accumulation_steps)
    )


def total_steps(config: SFTConfig, rows: int, min_steps: int) -> int:
    """Optimizer steps of a training on `rows` that does not stop early: the recipe's max_steps, or
    else its epochs, and at least `min_steps`.
    """
    if config.max_steps > 0:
        return config.max_steps
    return max(math.ceil(config.num_train_epochs * steps_per_epoch(config, rows)), min_steps)


def interval(every: float, steps: int) -> int:
    """The `save_steps` or `eval_steps` of a training of so many steps: below 1 they are a share."""
    if every < 1:
        every = math.ceil(every * steps)
    return int(every)


def _acts_from_suffix(job: Job) -> bool:
    return METHODS[job.method].acts_from == "suffix"


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
        "disable_tqdm": True,  # StepBar instead
        "remove_unused_columns": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},  # rows are tokens already
        "max_length": None,
        "packing": False,  # only the last invocation of a row is activated
        "padding_free": False,
        "train_sampling_strategy": "group_by_length",
        "dataloader_drop_last": False,
        "logging_strategy": "steps",
        "logging_steps": 1,  # the loss of each step, for an epoch's mean
        "save_strategy": "steps",
        "save_total_limit": 1,
        "save_only_model": False,  # a resumed run needs the optimizer and the schedule
        "resume_from_checkpoint": None,
        "ignore_data_skip": False,  # a resumed run goes on within its epoch
        "push_to_hub": False,
    }


def _check_keys(settings: dict[str, Any], config: type, owned: dict[str, Any], where: str) -> None:
    fields = {field.name for field in dataclasses.fields(config) if field.init}
    for key in settings:
        if key in owned:
            problem = f"'{key}' is set by the training stage itself"
            raise GuardError(problem, where=where, remedy="Remove it")
        if key not in fields:
            library = config.__module__.partition(".")[0]
            remedy = did_you_mean(key, fields) or f"See {config.__name__} of {library}"
            problem = f"unknown key '{key}' for {config.__name__}"
            raise GuardError(problem, where=where, remedy=remedy)


def _check_served(lora: dict[str, Any], where: str) -> None:
    """Raise GuardError for an adapter that vLLM would refuse."""
    for key, value in lora.items():
        if key == "init_lora_weights":
            is_served = value in SERVED_INITS
        else:
            is_served = key in SERVED or value == getattr(LoraConfig(), key)
        if not is_served:
            problem = f"'{key}' could not be served with this value"
            raise GuardError(problem, where=where, got=value, remedy="Remove it")


def _check_rank(job: Job, where: str) -> None:
    limit = job.recipe.max_rank
    with refusals("LoraConfig", where):
        rank = max(
            [job.settings.lora.get("r", 8), *job.settings.lora.get("rank_pattern", {}).values()]
        )
        is_served = rank <= limit
    if not is_served:
        problem = "the rank is above the engine's max_lora_rank: the adapter could not be served"
        remedy = "Lower r, or raise max_lora_rank"
        raise GuardError(problem, where=where, got=f"{rank} > {limit}", remedy=remedy)


def _check_range(config: SFTConfig, where: str) -> None:
    norm: float | None = config.max_grad_norm
    with refusals("SFTConfig", where):
        for key in POSITIVE:
            value = getattr(config, key)
            if value is not None and value <= 0:  # None: `eval_steps`, which need not be stated
                problem = f"'{key}' must be above 0"
                raise GuardError(problem, where=where, got=value, remedy="Raise it or remove it")
        is_norm = norm is not None and norm >= 0
    if not is_norm:
        problem = "'max_grad_norm' must be a number, 0 or above"
        remedy = "Write 0 for no clipping, or remove it"
        raise GuardError(problem, where=where, got=str(norm), remedy=remedy)


def _check_read(job: Job, default: SFTConfig, where: str) -> None:
    """Raise GuardError for a value other than the `default` that training would not read."""
    for key, value in job.trainer.items():
        if value == getattr(default, key):
            continue
        if key in NOT_OUR_LOSS or (job.recipe.is_encoder and key not in ENCODER_READS):
            remedy = "Remove it"
        elif _acts_from_suffix(job) and key not in ALORA_READS:
            remedy = "State it in methods.lora.trainer alone"
        else:
            continue
        raise GuardError(_is_trained_without(job, key), where=where, got=value, remedy=remedy)


def _is_trained_without(job: Job, key: str) -> str:
    return f"{METHODS[job.method].label} is trained without '{key}'"
