"""One adapter among those that are trained together: its rows, optimizer, schedule, checkpoint.
Knows nothing of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from trl.trainer.sft_config import SFTConfig

from guard.errors import GuardError
from guard.files.atomic import atomic_write
from train.adapter.settings import interval, optimizer_of, steps_per_epoch, total_steps
from train.adapter.steps import AveragedWeights, EarlyStopping, Progress, StepBatches
from train.adapter.trl import diverged
from train.calibration.validation import calibrated_loss
from train.examples import Row, Rows
from train.job import Job
from train.prefix.readout import HeadInTraining

CHECKPOINT = "member.pt"


@dataclass
class Member:
    """One adapter in training: its rows in its own order, its own weights and optimizer."""

    job: Job
    data: Rows
    config: SFTConfig
    weights: list[nn.Parameter] = field(default_factory=list)
    step: int = 0
    failure: GuardError | None = None
    head: HeadInTraining | None = None  # to be trained beside the weights
    average: AveragedWeights | None = None  # of those that answer by a head
    best: EarlyStopping | None = None  # of a head: the weights of its start or its end

    def __post_init__(self) -> None:
        config = self.config
        self.rows = self.data.train
        self.batch_rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
        self.steps_per_epoch = steps_per_epoch(config, len(self.rows))
        self.steps = total_steps(config, len(self.rows), self.job.min_steps)
        lengths = [len(row.prompt.token_ids) for row in self.rows]
        self._batches = StepBatches(lengths, self.batch_rows, config.seed)

    def begin(self, weights: list[nn.Parameter], logits: Sequence[float]) -> None:
        """Take the weights and the head's into an optimizer; go on where a run was interrupted.
        `logits` are what a head starts with on the validation rows.
        """
        job = self.job
        self.weights = weights
        if self.head:
            self.weights = [*weights, *self.head.parameters]
        self.optimizer, self.schedule = optimizer_of(
            self.config, self.weights, self.steps, job.name
        )
        job.open_scratch()
        is_resumed = self._checkpoint.is_file()
        if not is_resumed:
            EarlyStopping.discard(job.scratch)
        if self.head:
            self.best = EarlyStopping(job.scratch, self.steps)
            self.average = AveragedWeights(self.weights)
            self.record(logits)
        if is_resumed:
            self._resume()
        self.progress = Progress(
            job.name, step=self.step, steps=self.steps, steps_per_epoch=self.steps_per_epoch
        )

    @property
    def read(self) -> Sequence[Row]:
        """The rows that training reads in every epoch."""
        if self.answers_by_head:
            return (*self.rows, *self.data.validation)
        return self.rows

    @property
    def answered(self) -> Sequence[Row]:
        """The rows whose logits the last weights give on cached prefixes."""
        tests = self.data.test if self.job.of_study else ()
        return (*self.data.validation, *tests)

    @property
    def answers_by_head(self) -> bool:
        return self.job.settings.head is not None

    @property
    def running(self) -> bool:
        return self.failure is None and self.step < self.steps

    @property
    def is_evaluated(self) -> bool:
        """Whether validation is told of this step: of the last one of a head, whose start it is
        compared with.
        """
        return self.head is not None and self.failure is None and self.step == self.steps

    def batch(self) -> list[Row]:
        return [self.rows[index] for index in self._batches.at(self.step)]

    def update(self, loss: float) -> None:
        """Take one optimizer step with the gradients that the weights hold. A loss that is not a
        number ends this member alone.
        """
        if not math.isfinite(loss):
            self.failure = diverged(self.job.name, self.step + 1, loss)
            return
        if self.config.max_grad_norm:  # 0: no clipping
            nn.utils.clip_grad_norm_(self.weights, self.config.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.average:
            self.average.update(self.step)
        self.progress.loss(loss)
        self.progress.step(self.step)

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """The weights are those that validation tells of: with a head, the mean of all steps'."""
        if self.average:
            return self.average.in_place()
        return nullcontext()

    def record(self, logits: Sequence[float]) -> None:
        """Remember a head's weights as they are, if their `logits` of the validation rows are the
        best after Platt scaling: one that is too sure may rank better.
        """
        assert self.best is not None
        labels = [row.label for row in self.data.validation]
        self.best.record(self.step, calibrated_loss(logits, labels), self.weights)

    def save(self) -> None:
        """Write the checkpoint, if one is due after this step."""
        every = interval(self.config.save_steps, self.steps)
        if self.failure or not every or self.step % every or self.step == self.steps:
            return
        state = {
            "weights": [weight.data.clone() for weight in self.weights],
            "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "average": self.average.means if self.average else [],
        }
        with atomic_write(self._checkpoint) as part:
            torch.save(state, part)

    def _resume(self) -> None:
        state = torch.load(self._checkpoint, weights_only=True, map_location="cpu")
        for weight, saved in zip(self.weights, state["weights"], strict=True):
            weight.data.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        if self.average:
            self.average.restore(state["average"])
        self.step = state["step"]
        tqdm.write(f"{self.job.name}: resumes at step {self.step} of {self.steps}")

    @property
    def _checkpoint(self) -> Path:
        return self.job.scratch / CHECKPOINT
