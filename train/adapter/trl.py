"""Trains one adapter with PEFT and TRL. Knows nothing of rules, files of examples, thresholds or cards.

TRL's SFTTrainer is kept as it is but for three things. The loss: it is taken at the verdict token only, every row of a step
weighs the same, and the vocabulary is scored at that one position (SFTTrainer's own head scores every position unless Triton is
there: 70 % more time on a CPU). The order of the data: rows of similar length share a batch, and the order of an epoch depends
on nothing but the seed and the epoch, so that a resumed run sees the batches that it would have seen. And memory: a batch of
long conversations goes through the model in parts of at most BATCH_TOKENS.

An aLoRA can be trained here too, on whole prompts; `make train` does that many times faster in train/prefix/trainer.py, and the
tests hold the two to the same adapter.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from datasets import Dataset
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    get_scheduler,
)
from transformers.trainer_pt_utils import get_length_grouped_indices
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from guard.errors import GuardError
from guard.prompt import PromptBuilder
from guard.recipe import Recipe
from train.adapter import quantised
from train.adapter.batch import BATCH_TOKENS, PROMPT_TENSORS, by_length, left_padded
from train.adapter.early_stopping import EarlyStopping, validation_loss
from train.adapter.predict import verdict_logits
from train.adapter.progress import Progress
from train.examples import Row, Rows
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


def fit(job: Job, data: Rows) -> PeftModel:
    """The job's adapter, trained on the training split; an interrupted run's is resumed. Same seed, same machine: same weights."""
    job.open_scratch()
    trainer = trainer_of(job, data)
    checkpoint = whole_checkpoint(job.scratch)
    if checkpoint:
        print(f"{job.name}: resumes at {Path(checkpoint).name}", flush=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    trained = cast(PeftModel, trainer.accelerator.unwrap_model(trainer.model))
    if not job.recipe.quantization:
        return trained
    served = cast(
        PeftModel,
        get_peft_model(load_served_base(job.recipe, trainer.args.device), lora_config(job)),
    )
    set_peft_model_state_dict(
        served, get_peft_model_state_dict(trained, save_embedding_layers=False)
    )
    return served


def trainer_of(job: Job, data: Rows) -> VerdictTrainer:
    """TRL's trainer with the job's base, adapter and settings, ready to train."""
    config = trainer_config(job)
    per_epoch = steps_per_epoch(config, len(data.train))
    with refusals("PEFT or TRL", f"recipe '{job.recipe.name}', adapters.{job.method}"):
        trainer = VerdictTrainer(
            model=load_base(job.recipe, config.device),
            args=config,
            train_dataset=_dataset(data.train, job.builder),
            data_collator=_collate,
            processing_class=AutoTokenizer.from_pretrained(
                job.recipe.base_path, **_pinned(job.recipe)
            ),
            peft_config=lora_config(job),
            callbacks=[
                StepBar(job.name, per_epoch),
                *(
                    [StopEarly(job, data.validation, job.patience, per_epoch)]
                    if job.patience
                    else []
                ),
            ],
        )
    trainer.remove_callback(PrinterCallback)
    for weight in _trained(
        cast(torch.nn.Module, trainer.model)
    ):  # on a base of 4 bits TRL makes them bfloat16, too coarse for small steps
        weight.data = weight.data.float()
    return trainer


def load_base(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """The base that adapters are trained on, frozen on `device`: the one they are served on, or that in the recipe's quantization."""
    if not recipe.quantization:
        return load_served_base(recipe, device)
    dtype = getattr(torch, recipe.dtype)
    model = AutoModelForCausalLM.from_pretrained(
        recipe.base_path, dtype=dtype, **_pinned(recipe), **quantised.loading(recipe, device)
    )
    quantised.keep_trainable(model)
    return cast(PreTrainedModel, model.eval().requires_grad_(False))


def load_served_base(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """The base that adapters are served on, frozen on `device`."""
    loaded = AutoModelForCausalLM.from_pretrained(
        recipe.base_path, dtype=getattr(torch, recipe.dtype), **_pinned(recipe)
    )
    return cast(
        PreTrainedModel, cast(torch.nn.Module, loaded).to(device).eval().requires_grad_(False)
    )


def try_on(job: Job) -> None:
    """Put the job's fresh adapter on its base without weights. Raises GuardError for modules that the base does not have, or for a
    quantization that this machine cannot train in."""
    if job.recipe.quantization:
        quantised.check(job.recipe, trainer_config(job).device)
    config = AutoConfig.from_pretrained(job.recipe.base_path, **_pinned(job.recipe))
    with (
        torch.device("meta"),
        refusals("PEFT", f"recipe '{job.recipe.name}', adapters.{job.method}.lora"),
    ):
        get_peft_model(AutoModelForCausalLM.from_config(config), lora_config(job))


def _pinned(recipe: Recipe) -> dict[str, Any]:
    return {"revision": recipe.commit, "local_files_only": Path(recipe.base_path).is_dir()}


def steps_per_epoch(config: SFTConfig, rows: int) -> int:
    """Optimizer steps in which `rows` are read once."""
    return math.ceil(
        rows / (config.per_device_train_batch_size * config.gradient_accumulation_steps)
    )


def whole_checkpoint(scratch: Path) -> str | None:
    """The last checkpoint in `scratch` that was written to its end: the trainer's state is what is written last."""
    for folder in sorted(
        scratch.glob("checkpoint-*"), key=lambda path: -int(path.name.rsplit("-", 1)[1])
    ):
        state = folder / "trainer_state.json"
        try:
            json.loads(state.read_text(encoding="utf-8"))
        except (
            FileNotFoundError,
            json.JSONDecodeError,
        ):  # killed while writing this one; the one before is whole
            continue
        return str(folder)
    return None


class VerdictTrainer(SFTTrainer):
    """SFTTrainer with the loss at the verdict token, over batches of similar length, in parts of bounded size."""

    # By the rows of the step: the last micro-batch of an epoch may have fewer.
    loss_is_scaled_for_ga = True  # type: ignore[assignment]

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Cross-entropy of the verdict token over the whole vocabulary, in nats, summed over the rows, by the rows of the whole step."""
        outputs = model(
            **{name: inputs[name] for name in PROMPT_TENSORS}, logits_to_keep=1, use_cache=False
        )
        summed = torch.nn.functional.cross_entropy(
            outputs.logits[:, -1].float(), inputs["verdict_ids"], reduction="sum"
        )
        loss = summed / num_items_in_batch
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward over a micro-batch in parts; their gradients add up to the step's. Raises GuardError if it diverges."""
        lengths = inputs["attention_mask"].sum(1).tolist()
        loss = torch.zeros((), device=self.args.device)
        for rows in by_length(lengths, BATCH_TOKENS):
            width = max(lengths[row] for row in rows)
            part: dict[str, Any] = {name: inputs[name][rows, -width:] for name in PROMPT_TENSORS}
            loss += super().training_step(
                model, part | {"verdict_ids": inputs["verdict_ids"][rows]}, num_items_in_batch
            )
        if not torch.isfinite(loss):
            raise diverged(str(self.args.run_name), self.state.global_step, float(loss))
        return loss

    def _get_num_items_in_batch(
        self, batch_samples: list[dict[str, Any]], device: torch.device
    ) -> int:
        return sum(len(each["verdict_ids"]) for each in batch_samples)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        lengths = [
            len(row["input_ids"]) for row in cast(Dataset, train_dataset or self.train_dataset)
        ]
        return LengthGrouped(
            lengths,
            self.args.train_batch_size * self.args.gradient_accumulation_steps,
            self.args.seed,
        )


def diverged(name: str, step: int, loss: float) -> GuardError:
    """The error of a job whose loss is not a number any more."""
    where, remedy = f"{name}, step {step}", "Lower the learning rate in the recipe"
    return GuardError("the loss is not a number any more", where=where, got=loss, remedy=remedy)


class LengthGrouped(Sampler[int]):
    """Rows of similar length side by side, in an order that only `seed` and the epoch decide.

    Transformers' LengthGroupedSampler draws from the global generator, whose state at the start of an epoch differs between a
    run and its resumption.
    """

    def __init__(self, lengths: list[int], batch_rows: int, seed: int) -> None:
        self._lengths, self._batch_rows, self._seed, self._epoch = lengths, batch_rows, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader before each epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        return iter(
            get_length_grouped_indices(self._lengths, self._batch_rows, generator=generator)
        )


class StepBar(TrainerCallback):
    """One progress bar over the steps, with the current loss, and a line an epoch."""

    def __init__(self, name: str, per_epoch: int) -> None:
        self._name, self._per_epoch = name, per_epoch

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar where the run starts or resumes."""
        self._progress = Progress(
            self._name,
            step=state.global_step,
            steps=state.max_steps,
            steps_per_epoch=self._per_epoch,
        )
        self._bar = tqdm(
            total=state.max_steps, initial=state.global_step, desc="train", unit="step", leave=False
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move to the trainer's step."""
        self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the step's loss."""
        if logs and "loss" in logs:
            self._bar.set_postfix(loss=f"{logs['loss']:.3f}")
            self._progress.loss(logs["loss"])
            self._progress.step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar."""
        self._bar.close()


class StopEarly(TrainerCallback):
    """Ends training when the validation loss has not fallen for some epochs, and puts back the best epoch's weights."""

    def __init__(self, job: Job, validation: Sequence[Row], patience: int, per_epoch: int) -> None:
        self._job, self._stopping, self._per_epoch = (
            job,
            EarlyStopping(job.scratch, patience),
            per_epoch,
        )
        self._prompts, self._labels = (
            [row.prompt for row in validation],
            [row.label for row in validation],
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the trainer writes a checkpoint of this step."""
        if state.global_step % self._per_epoch == 0 or state.global_step == state.max_steps:
            loss = validation_loss(
                verdict_logits(kwargs["model"], self._prompts, self._job.builder), self._labels
            )
            self._stopping.record(state.global_step, loss, _trained(kwargs["model"]))
        control.should_training_stop |= self._stopping.ended(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the best weights back."""
        self._stopping.restore(_trained(kwargs["model"]))


def _trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _dataset(rows: Sequence[Row], builder: PromptBuilder) -> Dataset:
    return Dataset.from_dict(
        {
            "input_ids": [row.prompt.token_ids for row in rows],
            "verdict_id": [builder.yes_id if row.label else builder.no_id for row in rows],
        }
    )


def _collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    # Not called "labels": the trainer would then count tokens to scale the loss, shifted by one, and there is one per row.
    return left_padded([row["input_ids"] for row in rows]) | {
        "verdict_ids": torch.tensor([row["verdict_id"] for row in rows])
    }


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
