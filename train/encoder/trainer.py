"""Trains a LoRA on an encoder, together with a head of its own where its kind has one (`bases.py`).

The head begins as one fit to all of the rule's rows on the frozen encoder (Kumar et al., 2022: a
head that is fitted first keeps fine-tuning from distorting what the base knows), GLiNER2 as it is.
What that head has learnt of words stays as it is, and the adapter learns what they do not tell: of
a training row they say what a fit to other rows says of it, as they would know it by heart.
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
from safetensors.numpy import save_file
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm
from transformers import PreTrainedModel

from guard.errors import GuardError
from guard.head import WordWeights
from guard.method import WORDS
from guard.prompt.decoder import Prompt
from guard.prompt.encoder import EncoderPromptBuilder, Window
from train.adapter.early_stopping import FILE as BEST
from train.adapter.early_stopping import EarlyStopping
from train.adapter.settings import (
    interval,
    lora_config,
    optimizer_of,
    steps_per_epoch,
    total_steps,
    trainer_config,
)
from train.adapter.trained import save_adapter
from train.adapter.trl import LengthGrouped, diverged
from train.calibration.validation import validation_loss
from train.encoder.bases import BASES
from train.encoder.model import device, right_padded, span_means, span_words
from train.examples import Rows
from train.job import Job


@dataclass(frozen=True)
class TrainedEncoder:
    """A job's adapter, and its head if it has one, in PEFT's layers on the encoder; and what words
    say beside it.
    """

    model: PeftModel
    job: Job
    words: WordWeights
    validation_logits: Sequence[float] = ()

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        """Of each prompt the highest logit of what the rule judges in nats, uncalibrated, through
        plain PEFT.
        """
        builder = cast(EncoderPromptBuilder, self.job.builder)
        windows = [builder.windows(prompt.token_ids, self.job.reads) for prompt in prompts]
        base = BASES[self.job.recipe.kind]
        logits: list[float] = []
        of_prompts = base.span_logits(self.model, builder, windows)
        for of_prompt, spans in zip(windows, of_prompts, strict=True):
            of_words = self.words.logits(span_words(builder, of_prompt, self.job.reads))
            logits.append(float((spans[:, 0] + of_words).max()))
        return logits

    def save(self, folder: Path) -> None:
        """Write PEFT's two files, and the words; a head of the rule's own stands among the weights,
        as `classifier`.
        """
        save_adapter(self.model, self.job.recipe, folder)
        if self.words:
            save_file(self.words.tensors(), folder / WORDS)


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
        begun = self.base.begun(job, self.rows)
        self.words, self.held_out = begun.words, begun.held_out
        self.best_logits = begun.validation_logits  # of the validation rows, by the best weights
        self.model = _adapted(job, begun.base)
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        (job.scratch / BEST).unlink(missing_ok=True)  # of a run that was interrupted
        self.best = EarlyStopping(job.scratch, job.patience or self.steps, job.min_steps)
        self._train()
        self.best.restore(self.weights)
        return TrainedEncoder(self.model, job, self.words, self.best_logits)

    @property
    def steps(self) -> int:
        """Optimizer steps at most."""
        return total_steps(self.config, len(self.rows.train), self.job.min_steps)

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

    def _batches(self) -> Iterator[list[int]]:
        """The indices of each step's training rows: epoch after epoch, those of like length side by
        side.
        """
        size = self.config.per_device_train_batch_size
        lengths = [len(row.prompt.token_ids) for row in self.rows.train]
        sampler = LengthGrouped(lengths, size, self.config.seed)
        for step in range(self.steps):
            epoch, step_in_epoch = divmod(step, self._steps_per_epoch)
            if step_in_epoch == 0:
                sampler.set_epoch(epoch)
                order = list(sampler)
            yield order[step_in_epoch * size : (step_in_epoch + 1) * size]

    def _loss(self, batch: Sequence[int]) -> torch.Tensor:
        highest = self._highest(batch)
        ids, mask = right_padded(highest, device())
        train_adapter_alone(self.model)
        of_tokens = self.base.token_logits(self.model, ids, mask)
        logits: list[torch.Tensor] = []
        for index, tokens, window in zip(batch, of_tokens, highest, strict=True):
            of_spans = span_means(tokens, self.builder.spans(window))[:, 0]
            of_words = torch.from_numpy(self._of_words(index, window)).to(of_spans)
            logits.append((of_spans + of_words).max())
        of_rows = [float(self.rows.train[index].label) for index in batch]
        labels = torch.tensor(of_rows, device=of_tokens.device)
        return binary_cross_entropy_with_logits(torch.stack(logits), labels)

    def _of_words(self, index: int, window: Window) -> np.ndarray:
        """What words say of each span of a training row's window, [spans] in nats, from a fit that
        has not seen the row.
        """
        words, offset = self.held_out[index]
        return words.logits(span_words(self.builder, [window], self.job.reads)) + offset

    def _highest(self, batch: Sequence[int]) -> list[Window]:
        """Of each row the window with the highest logit; those of all rows are read together."""
        of_rows: list[list[Window]] = []
        for index in batch:
            token_ids = self.rows.train[index].prompt.token_ids
            of_rows.append(self.builder.windows(token_ids, self.job.reads))
        to_compare: list[list[Window]] = []
        for windows in of_rows:
            if len(windows) > 1:
                to_compare += [[window] for window in windows]
        spans = iter(self.base.span_logits(self.model, self.builder, to_compare))
        highest: list[Window] = []
        for index, windows in zip(batch, of_rows, strict=True):
            best = 0
            if len(windows) > 1:
                logits = [next(spans)[:, 0] + self._of_words(index, window) for window in windows]
                best = int(np.argmax([of_window.max() for of_window in logits]))
            highest.append(windows[best])
        return highest

    def _evaluate(self, step: int) -> None:
        logits = self.best_logits
        if step > 0 or not logits:
            trained = TrainedEncoder(self.model, self.job, self.words)
            logits = trained.logits([row.prompt for row in self.rows.validation])
        loss = validation_loss(logits, [row.label for row in self.rows.validation])
        self.best.record(step, loss, self.weights)
        if self.best.best_step == step:
            self.best_logits = logits
        mean = f"{np.mean(self.losses):.3f}" if self.losses else "none"
        self.losses.clear()
        tqdm.write(
            f"{self.job.name}: step {step} of {self.steps}, training loss {mean}, "
            f"validation loss {loss:.3f}"
        )

    @property
    def _eval_steps(self) -> int:
        return interval(self.config.eval_steps or self._steps_per_epoch, self.steps)

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
