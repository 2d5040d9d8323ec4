"""Trains a LoRA on an encoder, together with a head of its own (`bases.py`).

The head starts as one fit to all rows on the frozen encoder: a head that is fitted first keeps
fine-tuning from distorting the base (Kumar et al., 2022).  The head's word
weights stay fixed, and the adapter learns what words do not tell. A training row gets the word
weights of a fit to other rows, because a fit to itself would know it by heart.

Every `eval_steps` the mean of the weights of all steps so far is evaluated on all validation rows,
by the loss after Platt scaling: an adapter that is too sure may rank better. The weights with the
lowest loss are kept, those of the start among them. Training ends after `early_stopping_patience`
evaluations without a lower loss. With enough own rows beside generated rows the head is then fitted
again (`trained.py`). An interrupted run begins anew. Knows nothing of thresholds and cards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm
from transformers import PreTrainedModel

from guard.errors import GuardError
from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.windows import Window
from guard.rule import Reads
from train.adapter.settings import (
    interval,
    lora_config,
    optimizer_of,
    steps_per_epoch,
    total_steps,
    trainer_config,
)
from train.adapter.steps import AveragedWeights, EarlyStopping, StepBatches
from train.adapter.trl import diverged
from train.batch import BATCH_TOKENS, by_length
from train.calibration.validation import calibrated_loss
from train.encoder.bases import training_start
from train.encoder.model import device, read, right_padded, span_means, span_words, token_logits
from train.encoder.trained import TrainedEncoder, with_head_of_own_rows
from train.examples import Row, Rows
from train.head.fit import HeldOutWords
from train.job import Job


def fit(work: Sequence[tuple[Job, Rows]]) -> Iterator[TrainedEncoder | GuardError]:
    """Train the jobs one after another. The same seed gives the same weights on one machine."""
    for job, rows in work:
        try:
            yield with_head_of_own_rows(Training(job, rows).run(), rows)
        except GuardError as error:
            yield error


class Training:
    """One adapter and its head in training."""

    def __init__(self, job: Job, rows: Rows) -> None:
        job.open_scratch()
        self._job = job
        self._validation = rows.validation
        self._config = trainer_config(job)
        self._steps = total_steps(self._config, len(rows.train), job.min_steps)
        eval_steps = self._config.eval_steps or steps_per_epoch(self._config, len(rows.train))
        self._eval_steps = interval(eval_steps, self._steps)
        lengths = [len(row.prompt.token_ids) for row in rows.train]
        self._batches = StepBatches(
            lengths, self._config.per_device_train_batch_size, self._config.seed
        )
        start = training_start(job, rows)
        builder = cast(EncoderPromptBuilder, job.builder)
        self.objective = Objective(builder, job.reads, rows.train, start.held_out)
        self._words = start.words
        self._first_logits = start.validation_logits
        adapted = get_peft_model(cast(PreTrainedModel, start.base), lora_config(job))
        self._model = cast(PeftModel, adapted.to(device()))
        self._weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._optimizer, self._schedule = optimizer_of(
            self._config, self._weights, self._steps, job.name
        )
        self._average = AveragedWeights(self._weights)
        self._step = 0
        self._losses: list[float] = []  # since the last evaluation
        EarlyStopping.discard(job.scratch)  # an interrupted run's
        self._best = EarlyStopping(job.scratch, job.patience or self._steps, job.min_steps)

    def run(self) -> TrainedEncoder:
        """Train to the end and return the best weights. Raises GuardError if the loss diverges."""
        self._evaluate(self._first_logits)
        with tqdm(total=self._steps, desc="train", unit="step", leave=False) as bar:
            while not self._is_over:
                batch = self._batches.at(self._step)
                self._update(self.objective.backward(self._model, batch))
                bar.update()
                if self._is_evaluated:
                    with self._average.in_place():
                        self._evaluate()
        self._best.restore(self._weights)
        return TrainedEncoder(self._model, self._job, self._words, self._best.best_logits)

    @property
    def _is_evaluated(self) -> bool:
        return self._step % self._eval_steps == 0 or self._step == self._steps

    @property
    def _is_over(self) -> bool:
        is_stopped = self._is_evaluated and self._best.ended(self._step)
        return is_stopped or self._step == self._steps

    def _update(self, loss: float) -> None:
        """Take one optimizer step with the gradients that the weights hold."""
        if not math.isfinite(loss):
            raise diverged(self._job.name, self._step + 1, loss)
        if self._config.max_grad_norm:
            nn.utils.clip_grad_norm_(self._weights, self._config.max_grad_norm)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        self._losses.append(loss)
        self._step += 1
        self._average.update(self._step)

    def _evaluate(self, logits: Sequence[float] = ()) -> None:
        """Record the weights and their loss, from the validation rows' `logits` where known."""
        if not logits:
            trained = TrainedEncoder(self._model, self._job, self._words)
            logits = trained.logits([row.prompt for row in self._validation])
        loss = calibrated_loss(logits, [row.label for row in self._validation])
        self._best.record(self._step, loss, self._weights, logits)
        mean = f"{np.mean(self._losses):.3f}" if self._losses else "none"
        self._losses.clear()
        tqdm.write(
            f"{self._job.name}: step {self._step} of {self._steps}, training loss {mean}, "
            f"validation loss {loss:.3f} when calibrated"
        )


@dataclass(frozen=True)
class Objective:
    """What training lowers: the binary cross-entropy of the rows' labels, in nats. A row is trained
    on its highest span, in the window that has it. `held_out` are the word weights for each row,
    from a fit that has not seen it.
    """

    builder: EncoderPromptBuilder
    reads: Reads
    rows: Sequence[Row]
    held_out: Sequence[HeldOutWords]

    def backward(self, model: PeftModel, batch: Sequence[int]) -> float:
        """The mean loss of these rows; its gradients are added to the adapter's. The rows go
        through the model in parts of bounded size, whose gradients add up.
        """
        windows = self._highest(model, batch)
        train_adapter_alone(model)
        loss = 0.0
        for part in by_length([len(window.token_ids) for window in windows], BATCH_TOKENS):
            in_order = sorted(part)
            rows = [batch[number] for number in in_order]
            summed = self._summed_loss(model, rows, [windows[number] for number in in_order])
            part_loss = summed / len(batch)
            part_loss.backward()
            loss += part_loss.item()
        return loss

    def _summed_loss(
        self, model: PeftModel, rows: Sequence[int], windows: Sequence[Window]
    ) -> Tensor:
        ids, mask = right_padded(windows, device())
        batch_token_logits = token_logits(model, ids, mask)
        logits: list[Tensor] = []
        for index, row_logits, window in zip(rows, batch_token_logits, windows, strict=True):
            span_logits = span_means(row_logits, self.builder.spans(window))[:, 0]
            word_logits = torch.from_numpy(self._word_logits(index, window)).to(span_logits)
            logits.append((span_logits + word_logits).max())
        labels = torch.tensor([float(self.rows[index].label) for index in rows])
        labels = labels.to(batch_token_logits.device)
        return binary_cross_entropy_with_logits(torch.stack(logits), labels, reduction="sum")

    def _word_logits(self, index: int, window: Window) -> np.ndarray:
        """What its words add to the logit of each span of a row's window, [spans] in nats."""
        words, offset = self.held_out[index]
        return words.logits(span_words(self.builder, [window], self.reads)) + offset

    def _highest(self, model: PeftModel, batch: Sequence[int]) -> list[Window]:
        """Each row's window with the highest logit. The windows of all rows are read together."""
        row_windows: list[list[Window]] = []
        for index in batch:
            row_windows.append(self.builder.windows(self.rows[index].prompt.token_ids, self.reads))
        to_compare: list[list[Window]] = []
        for windows in row_windows:
            if len(windows) > 1:
                to_compare += [[window] for window in windows]
        span_logits = iter(read(model, token_logits, self.builder, to_compare))
        highest: list[Window] = []
        for index, windows in zip(batch, row_windows, strict=True):
            best = 0
            if len(windows) > 1:
                window_logits: list[float] = []
                for window in windows:
                    logits = next(span_logits)[:, 0] + self._word_logits(index, window)
                    window_logits.append(logits.max())
                best = int(np.argmax(window_logits))
            highest.append(windows[best])
        return highest


def train_adapter_alone(model: PeftModel) -> None:
    """Turn the adapter's dropout on, as its settings say, and the base's off. The base's would draw
    a number for every weight of its attention: a step of 16 windows takes 2.7 s on two cores with
    it, and 1.5 s without.
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout.train()
