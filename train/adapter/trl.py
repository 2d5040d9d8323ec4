"""Trains one adapter with PEFT and TRL.

TRL's SFTTrainer is kept as it is but for three things. The loss: it is taken at the verdict token
only, every row of a step weighs the same, and the vocabulary is scored at that one position
(SFTTrainer's own head scores every position unless Triton is there: 70 % more time on a CPU). The
order of the data: rows of similar length share a batch, and the order of an epoch depends on
nothing but the seed and the epoch, so that a resumed run sees the batches that it would have seen.
And memory: a batch of long conversations goes through the model in parts of at most BATCH_TOKENS.

An aLoRA can be trained here too, on whole prompts; `make train` does that many times faster in
train/prefix/trainer.py, and the tests hold the two to the same adapter. Knows nothing of rules,
files of examples, thresholds or cards.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from tqdm import tqdm
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl.trainer.sft_trainer import SFTTrainer

from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from train.adapter.load import load_base
from train.adapter.settings import lora_config, steps_per_epoch, total_steps, trainer_config
from train.adapter.steps import LengthGrouped, Progress
from train.base import load_served_base, pinned, refusals
from train.batch import BATCH_TOKENS, LAST_POSITION, PROMPT_TENSORS, by_length, left_padded
from train.examples import Row, Rows
from train.job import Job


def fit(job: Job, data: Rows) -> PeftModel:
    """The job's adapter, trained on the training split; an interrupted run's is resumed. The same
    seed gives the same weights on the same machine. Raises GuardError if the loss diverges.
    """
    job.open_scratch()
    checkpoint = whole_checkpoint(job.scratch)
    if checkpoint:
        print(f"{job.name}: resumes at {Path(checkpoint).name}", flush=True)
    trainer = trl_trainer(job, data)
    trainer.train(resume_from_checkpoint=checkpoint)
    trained = cast(PeftModel, trainer.accelerator.unwrap_model(trainer.model))
    if job.recipe.trains_on_served_base:
        return trained
    return _on_served_base(job, trained, trainer.args.device)


def trl_trainer(job: Job, data: Rows) -> VerdictTrainer:
    """TRL's trainer with the job's base, adapter and settings, ready to train."""
    config = trainer_config(job)
    per_epoch = steps_per_epoch(config, len(data.train))
    config.max_steps = total_steps(config, len(data.train), job.min_steps)
    callbacks: list[TrainerCallback] = [StepBar(job.name, per_epoch)]
    with refusals("PEFT or TRL", f"recipe {job.recipe.name}: methods.{job.method}"):
        trainer = VerdictTrainer(
            model=load_base(job.recipe, config.device),
            args=config,
            train_dataset=_dataset(data.train, job.builder),
            data_collator=_collate,
            processing_class=AutoTokenizer.from_pretrained(
                job.recipe.base_path, **pinned(job.recipe)
            ),
            peft_config=lora_config(job),
            callbacks=callbacks,
        )
    trainer.remove_callback(PrinterCallback)
    # On a base of 4 bits TRL makes them bfloat16, too coarse for small steps.
    for weight in cast(torch.nn.Module, trainer.model).parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return trainer


def whole_checkpoint(scratch: Path) -> str | None:
    """The last checkpoint in `scratch` that was written to its end. The trainer's state is what is
    written last. A checkpoint that a kill cut off is passed over; the one before is whole.
    """
    steps = [int(path.name.rsplit("-", 1)[1]) for path in scratch.glob("checkpoint-*")]
    for step in sorted(steps, reverse=True):
        folder = scratch / f"checkpoint-{step}"
        try:
            json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            continue
        return str(folder)
    return None


class VerdictTrainer(SFTTrainer):
    """SFTTrainer with the loss at the verdict token, on batches of like length, in parts."""

    # Divided by the rows of the step: the last micro-batch of an epoch may have fewer.
    loss_is_scaled_for_ga = True  # type: ignore[assignment]

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The verdict token's cross-entropy, in nats, of all rows over the rows of the step."""
        prompt = {name: inputs[name] for name in PROMPT_TENSORS}
        outputs = model(**prompt, logits_to_keep=LAST_POSITION, use_cache=False)
        summed = torch.nn.functional.cross_entropy(
            outputs.logits[:, -1].float(), inputs["verdict_ids"], reduction="sum"
        )
        return summed / num_items_in_batch

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward over a micro-batch in parts, whose gradients add up to the step's.
        Raises GuardError if the loss diverges.
        """
        lengths = inputs["attention_mask"].sum(1).tolist()
        loss = torch.zeros((), device=self.args.device)
        for rows in by_length(lengths, BATCH_TOKENS):
            width = max(lengths[row] for row in rows)
            part: dict[str, Any] = {name: inputs[name][rows, -width:] for name in PROMPT_TENSORS}
            part["verdict_ids"] = inputs["verdict_ids"][rows]
            loss += super().training_step(model, part, num_items_in_batch)
        if not torch.isfinite(loss):
            step = self.state.global_step + 1
            raise diverged(str(self.args.run_name), step, float(loss))
        return loss

    def _get_num_items_in_batch(
        self, batch_samples: list[dict[str, Any]], device: torch.device
    ) -> int:
        return sum(len(sample["verdict_ids"]) for sample in batch_samples)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> LengthGrouped:
        dataset = cast(Dataset, train_dataset or self.train_dataset)
        lengths = [len(row["input_ids"]) for row in dataset]
        step_rows = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return LengthGrouped(lengths, step_rows, self.args.seed)


def diverged(name: str, step: int, loss: float) -> GuardError:
    """The error of a job whose loss is NaN or infinite."""
    remedy = "Lower the learning rate in the recipe"
    problem = "the loss is NaN or infinite"
    return GuardError(problem, where=f"{name}, step {step}", got=loss, remedy=remedy)


class StepBar(TrainerCallback):
    """One progress bar over the steps, with the current loss, and a line an epoch."""

    def __init__(self, name: str, per_epoch: int) -> None:
        self._name = name
        self._per_epoch = per_epoch

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar where the run starts or resumes."""
        first, steps = state.global_step, state.max_steps
        self._progress = Progress(
            self._name, step=first, steps=steps, steps_per_epoch=self._per_epoch
        )
        self._bar = tqdm(total=steps, initial=first, desc="train", unit="step", leave=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move to the trainer's step. The last one has no checkpoint: resumed there, the trainer
        would take a step more.
        """
        self._bar.update(state.global_step - self._bar.n)
        if state.global_step >= state.max_steps:
            control.should_save = False

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            self._bar.set_postfix(loss=f"{logs['loss']:.3f}")
            self._progress.loss(logs["loss"])
            self._progress.step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.close()


def _on_served_base(job: Job, trained: PeftModel, device: torch.device) -> PeftModel:
    base = load_served_base(job.recipe, device)
    served = cast(PeftModel, get_peft_model(base, lora_config(job)))
    weights = get_peft_model_state_dict(trained, save_embedding_layers=False)
    set_peft_model_state_dict(served, weights)
    return served


def _dataset(rows: Sequence[Row], builder: PromptBuilder) -> Dataset:
    columns = {
        "input_ids": [row.prompt.token_ids for row in rows],
        "verdict_id": [row.verdict_id(builder) for row in rows],
    }
    return Dataset.from_dict(columns)


def _collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    # Not called "labels": the trainer would then count tokens to scale the loss, shifted by one,
    # and there is one per row.
    verdict_ids = torch.tensor([row["verdict_id"] for row in rows])
    return left_padded([row["input_ids"] for row in rows]) | {"verdict_ids": verdict_ids}
