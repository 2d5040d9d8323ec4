"""Trains a LoRA on an encoder, together with a head of its own where its kind has one (`bases.py`).

The head begins as the logistic regression on the frozen encoder's states (Kumar et al., 2022: a
head that is fitted first keeps fine-tuning from distorting what the base knows), GLiNER2 as it is.
With few rows the result is no worse than that on the validation split: it is the first of the
weights that are compared. Training is a budget of steps, not of epochs; every `eval_steps` the
validation loss is taken, the weights with the lowest are kept, and training ends after
`early_stopping_patience` such evaluations without a lower one. A row is trained on its highest
span, and of several windows on that with the highest. A run takes minutes, so one that was
interrupted begins again. Knows nothing of thresholds, cards or files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm
from transformers import PreTrainedModel

from guard.errors import GuardError
from guard.prompt.decoder import Prompt
from guard.prompt.encoder import EncoderPromptBuilder, Window
from train.adapter.early_stopping import EarlyStopping
from train.adapter.settings import lora_config, optimizer_of, steps_per_epoch, trainer_config
from train.adapter.trained import save_adapter
from train.adapter.trl import LengthGrouped, diverged
from train.calibration.validation import validation_loss
from train.encoder.bases import BASES
from train.encoder.model import device, right_padded, span_means
from train.examples import Row, Rows
from train.job import Job


@dataclass(frozen=True)
class TrainedEncoder:
    """A job's adapter, and its head if it has one, in PEFT's layers on the encoder."""

    model: PeftModel
    job: Job
    validation_logits: Sequence[float] = ()

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        """Of each prompt the highest logit of what the rule judges in nats, uncalibrated, through
        plain PEFT.
        """
        builder = cast(EncoderPromptBuilder, self.job.builder)
        windows = [builder.windows(prompt.token_ids, self.job.reads) for prompt in prompts]
        base = BASES[self.job.recipe.kind]
        return [float(spans.max()) for spans in base.span_logits(self.model, builder, windows)]

    def save(self, folder: Path) -> None:
        """Write PEFT's two files; a head of the rule's own stands among the weights, as
        `classifier`.
        """
        save_adapter(self.model, self.job.recipe, folder)


def fit(work: Sequence[tuple[Job, Rows]]) -> Iterator[TrainedEncoder | GuardError]:
    """Train the jobs one after another; the same seed gives the same weights on one machine."""
    for job, rows in work:
        try:
            yield Training(job, rows).run()
        except GuardError as error:
            yield error


@dataclass
class Training:
    """One adapter and its head in training."""

    job: Job
    rows: Rows
    losses: list[float] = field(default_factory=list)

    def run(self) -> TrainedEncoder:
        """Raises GuardError if the loss diverges."""
        job = self.job
        job.open_scratch()
        self.builder = cast(EncoderPromptBuilder, job.builder)
        self.config = trainer_config(job)
        self.base = BASES[job.recipe.kind]
        self.model = _adapted(job, self.base.begun(job, self.rows))
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.best = EarlyStopping(job.scratch, job.patience or self.steps)
        self._train()
        self.best.restore(self.weights)
        return TrainedEncoder(self.model, job)

    @property
    def steps(self) -> int:
        """Optimizer steps at most."""
        if self.config.max_steps > 0:
            return self.config.max_steps
        return math.ceil(self.config.num_train_epochs * self._steps_per_epoch)

    def _train(self) -> None:
        optimizer, schedule = optimizer_of(self.config, self.weights, self.steps, self.job.name)
        self._evaluate(0)
        bar = tqdm(total=self.steps, desc="train", unit="step", leave=False)
        with bar:
            for step, batch in enumerate(self._batches(), start=1):
                loss = self._loss(batch)
                if not math.isfinite(loss.item()):
                    raise diverged(self.job.name, step, loss.item())
                loss.backward()
                if self.config.max_grad_norm:
                    nn.utils.clip_grad_norm_(self.weights, self.config.max_grad_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                self.losses.append(loss.item())
                bar.update()
                if step % self._eval_steps == 0 or step == self.steps:
                    self._evaluate(step)
                    if self.best.ended(step):
                        return

    def _batches(self) -> Iterator[list[Row]]:
        """The rows of each step: epoch after epoch, rows of like length side by side."""
        rows = self.rows.train
        size = self.config.per_device_train_batch_size
        lengths = [len(row.prompt.token_ids) for row in rows]
        sampler = LengthGrouped(lengths, size, self.config.seed)
        for step in range(self.steps):
            epoch, step_in_epoch = divmod(step, self._steps_per_epoch)
            if step_in_epoch == 0:
                sampler.set_epoch(epoch)
                order = list(sampler)
            indices = order[step_in_epoch * size : (step_in_epoch + 1) * size]
            yield [rows[index] for index in indices]

    def _loss(self, batch: Sequence[Row]) -> torch.Tensor:
        highest = self._highest(self._windows(batch))
        ids, mask = right_padded(highest, device())
        train_adapter_alone(self.model)
        of_tokens = self.base.token_logits(self.model, ids, mask)
        logits: list[torch.Tensor] = []
        for tokens, window in zip(of_tokens, highest, strict=True):
            logits.append(span_means(tokens, self.builder.spans(window)).max())
        labels = torch.tensor([float(row.label) for row in batch], device=of_tokens.device)
        return binary_cross_entropy_with_logits(torch.stack(logits), labels)

    def _windows(self, rows: Sequence[Row]) -> list[list[Window]]:
        """Of each row those that hold what the rule judges."""
        reads = self.job.reads
        return [self.builder.windows(row.prompt.token_ids, reads) for row in rows]

    def _highest(self, of_rows: Sequence[Sequence[Window]]) -> list[Window]:
        """Of each row the window with the highest logit; those of all rows are read together."""
        to_compare: list[list[Window]] = []
        for windows in of_rows:
            if len(windows) > 1:
                to_compare += [[window] for window in windows]
        spans = iter(self.base.span_logits(self.model, self.builder, to_compare))
        highest: list[Window] = []
        for windows in of_rows:
            best = 0
            if len(windows) > 1:
                best = int(np.argmax([next(spans).max() for _ in windows]))
            highest.append(windows[best])
        return highest

    def _evaluate(self, step: int) -> None:
        windows = self._windows(self.rows.validation)
        spans = self.base.span_logits(self.model, self.builder, windows)
        logits = [float(of_row.max()) for of_row in spans]
        loss = validation_loss(logits, [row.label for row in self.rows.validation])
        self.best.record(step, loss, self.weights)
        mean = f"{np.mean(self.losses):.3f}" if self.losses else "none"
        self.losses.clear()
        tqdm.write(
            f"{self.job.name}: step {step} of {self.steps}, training loss {mean}, "
            f"validation loss {loss:.3f}"
        )

    @property
    def _eval_steps(self) -> int:
        return int(self.config.eval_steps or self._steps_per_epoch)

    @property
    def _steps_per_epoch(self) -> int:
        return steps_per_epoch(self.config, len(self.rows.train))


def train_adapter_alone(model: PeftModel) -> None:
    """Let the adapter's dropout be on, as its settings say, and the base's be off.

    The base's would draw a number for every weight of its attention: 2.7 s a step of 16 windows on
    two cores, of which 1.5 without it.
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout.train()


def _adapted(job: Job, base: nn.Module) -> PeftModel:
    """A fresh adapter on the base, from the job's seed."""
    adapted = get_peft_model(cast(PreTrainedModel, base), lora_config(job))
    return cast(PeftModel, adapted.to(device()))
