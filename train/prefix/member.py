"""One adapter among those that are trained together: its rows, optimizer, schedule, checkpoint. Knows nothing of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from trl.trainer.sft_config import SFTConfig

from guard.errors import GuardError
from guard.files.atomic import atomic_write
from train.adapter.early_stopping import EarlyStopping
from train.adapter.progress import Progress
from train.adapter.settings import optimizer_of, steps_per_epoch
from train.adapter.trl import LengthGrouped, diverged
from train.examples import Row, Rows
from train.job import Job

CHECKPOINT = "shared_prefix.pt"


@dataclass
class Member:
    """One adapter in training: its rows in its own order, its own weights and optimizer."""

    job: Job
    data: Rows
    config: SFTConfig
    weights: list[nn.Parameter] = field(default_factory=list)
    step: int = 0
    failure: GuardError | None = None
    early_stopping: EarlyStopping | None = None

    def __post_init__(self) -> None:
        self.rows = self.data.train
        self.batch_rows = (
            self.config.per_device_train_batch_size * self.config.gradient_accumulation_steps
        )
        self.steps_per_epoch = steps_per_epoch(self.config, len(self.rows))
        epochs = self.config.num_train_epochs
        self.steps = (
            self.config.max_steps
            if self.config.max_steps > 0
            else math.ceil(epochs * self.steps_per_epoch)
        )
        self._order: tuple[int, list[int]] = (-1, [])  # of the epoch that it names
        self._sampler = LengthGrouped(
            [len(row.prompt.token_ids) for row in self.rows], self.batch_rows, self.config.seed
        )

    def begin(self, weights: list[nn.Parameter]) -> None:
        """Take the weights into an optimizer, and go on where an interrupted run stopped."""
        self.weights = weights
        self.optimizer, self.schedule = optimizer_of(
            self.config, weights, self.steps, self.job.name
        )
        self.job.open_scratch()
        self.early_stopping = (
            EarlyStopping(self.job.scratch, self.job.patience) if self.job.patience else None
        )
        if self._checkpoint.is_file():
            state = torch.load(self._checkpoint, weights_only=True, map_location="cpu")
            for weight, saved in zip(weights, state["weights"], strict=True):
                weight.data.copy_(saved)
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])
            self.step = state["step"]
            tqdm.write(f"{self.job.name}: resumes at step {self.step} of {self.steps}")
        self.progress = Progress(
            self.job.name, step=self.step, steps=self.steps, steps_per_epoch=self.steps_per_epoch
        )

    @property
    def read(self) -> Sequence[Row]:
        """What training reads in every epoch."""
        return (*self.rows, *self.data.validation) if self.job.patience else self.rows

    @property
    def running(self) -> bool:
        """Whether there are steps left."""
        ended = self.early_stopping is not None and self.early_stopping.ended(self.step)
        return self.failure is None and self.step < self.steps and not ended

    @property
    def at_epoch_end(self) -> bool:
        """Whether an epoch has just ended."""
        return self.failure is None and (
            self.step % self.steps_per_epoch == 0 or self.step == self.steps
        )

    def batch(self) -> list[Row]:
        """The rows of the next step."""
        epoch, within = divmod(self.step, self.steps_per_epoch)
        if self._order[0] != epoch:
            self._sampler.set_epoch(epoch)
            self._order = epoch, list(self._sampler)
        return [
            self.rows[index]
            for index in self._order[1][within * self.batch_rows : (within + 1) * self.batch_rows]
        ]

    def update(self, loss: float) -> None:
        """One optimizer step with the gradients that the weights hold; a loss that is not a number ends this member alone."""
        if not math.isfinite(loss):
            self.failure = diverged(self.job.name, self.step, loss)
            return
        if self.config.max_grad_norm:  # TRL's words for never are 0 and null
            nn.utils.clip_grad_norm_(self.weights, self.config.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.progress.loss(loss)
        self.progress.step(self.step)

    def save(self) -> None:
        """Write the checkpoint, if one is due after this step."""
        every = (
            self.config.save_steps
            if self.config.save_steps >= 1
            else math.ceil(self.config.save_steps * self.steps)
        )
        if self.failure or not every or self.step % every or self.step == self.steps:
            return
        state = {"weights": [weight.data.clone() for weight in self.weights], "step": self.step}
        state |= {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
        with atomic_write(self._checkpoint) as part:
            torch.save(state, part)

    @property
    def _checkpoint(self) -> Path:
        return self.job.scratch / CHECKPOINT
