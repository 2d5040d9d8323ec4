"""The steps of a training: their rows, progress and best weights. Knows nothing of models."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Sampler
from tqdm import tqdm
from transformers.trainer_pt_utils import get_length_grouped_indices

from guard.files.atomic import atomic_write

FILE = "best_weights.pt"
DECAY = 3  # of averaged weights


class EarlyStopping:
    """Keeps the best evaluation's weights and every evaluation's validation loss in `folder`. So a
    resumed run decides as an uninterrupted one. A step that is recorded is left as it is; a resumed
    run may compute it again.
    """

    def __init__(self, folder: Path, patience: int, min_steps: int = 0) -> None:
        self._file = folder / FILE
        self._patience = patience
        self._min_steps = min_steps
        self._losses: dict[int, float] = {}
        self._weights: list[Tensor] = []  # the best evaluation's, as its logits
        self.best_logits: list[float] = []
        if self._file.is_file():
            state = torch.load(self._file, weights_only=True)
            self._losses, self._weights = state["losses"], state["weights"]
            self.best_logits = state["logits"]

    def record(
        self, step: int, loss: float, weights: Sequence[Tensor], logits: Sequence[float] = ()
    ) -> None:
        """The validation loss in nats and the weights after `step` steps, and the validation rows'
        logits under these, if they are to be kept. A loss that is not finite is the highest.
        """
        if step in self._losses:
            return
        self._losses[step] = loss if math.isfinite(loss) else math.inf
        if self.best_step == step:
            self._weights = [weight.detach().cpu().clone() for weight in weights]
            self.best_logits = list(logits)
        state = {"losses": self._losses, "weights": self._weights, "logits": self.best_logits}
        with atomic_write(self._file) as part:
            torch.save(state, part)

    @staticmethod
    def discard(folder: Path) -> None:
        (folder / FILE).unlink(missing_ok=True)

    @property
    def best_step(self) -> int:
        return _best(self._losses)

    def ended(self, step: int) -> bool:
        """Whether after the least steps `patience` evaluations brought no lower loss by `step`."""
        if step < self._min_steps:
            return False
        losses = {at: loss for at, loss in self._losses.items() if at <= step}
        best = _best(losses)
        return sum(at > best for at in losses) >= self._patience

    def restore(self, weights: Sequence[Tensor]) -> None:
        """Put the best weights into `weights`; leave these if nothing was recorded."""
        for weight, best in zip(weights, self._weights or weights, strict=True):
            weight.data.copy_(best)


def _best(losses: dict[int, float]) -> int:
    """The step with the lowest loss, the first of equal ones; 0 if there is none."""
    return min(losses, key=lambda step: (losses[step], step), default=0)


class AveragedWeights:
    """The mean of `weights`, which training changes in place. Averaging smooths what single batches
    do to the weights (Polyak and Juditsky, 1992). Later steps weigh more, step t as t (t + 1)
    (t + 2): polynomial-decay averaging (Shamir and Zhang, 2013, section 4). docs/lessons.md
    compares decays.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = [weight.detach() for weight in weights]
        self.means = [weight.clone() for weight in self._weights]

    def update(self, step: int) -> None:
        """Count the weights as they are after step `step`, the first of which is 1."""
        torch._foreach_lerp_(self.means, self._weights, (DECAY + 1) / (DECAY + step))

    def restore(self, means: Sequence[Tensor]) -> None:
        """Go on from an interrupted run's means."""
        _copy(means, self.means)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The weights are their mean, and as training left them afterwards."""
        trained = [weight.clone() for weight in self._weights]
        _copy(self.means, self._weights)
        try:
            yield
        finally:
            _copy(trained, self._weights)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


class LengthGrouped(Sampler[int]):
    """Rows of similar length side by side, in an order that only `seed` and the epoch decide.
    Transformers' LengthGroupedSampler draws from the global generator, whose state at the start of
    an epoch differs between a run and its resumption.
    """

    def __init__(self, lengths: list[int], batch_rows: int, seed: int) -> None:
        self._lengths = lengths
        self._batch_rows = batch_rows
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        indices = get_length_grouped_indices(self._lengths, self._batch_rows, generator=generator)
        return iter(indices)


class StepBatches:
    """The batches of all steps, epoch after epoch: indices of rows, in LengthGrouped's order."""

    def __init__(self, lengths: list[int], batch_rows: int, seed: int) -> None:
        self._batch_rows = batch_rows
        self._steps_per_epoch = math.ceil(len(lengths) / batch_rows)
        self._sampler = LengthGrouped(lengths, batch_rows, seed)
        self._epoch = -1
        self._order: list[int] = []  # of the rows in `_epoch`

    def at(self, step: int) -> list[int]:
        """The rows of the step after `step` others. The last batch of an epoch may be smaller."""
        epoch, step_in_epoch = divmod(step, self._steps_per_epoch)
        if self._epoch != epoch:
            self._sampler.set_epoch(epoch)
            self._epoch = epoch
            self._order = list(self._sampler)
        start = step_in_epoch * self._batch_rows
        return self._order[start : start + self._batch_rows]


class Progress:
    """Prints `name: epoch 2 of 4, loss 0.412, 03:10 left` at the end of each epoch."""

    def __init__(self, name: str, *, step: int, steps: int, steps_per_epoch: int) -> None:
        self._name = name
        self._first = step
        self._steps = steps
        self._per_epoch = steps_per_epoch
        self._epochs = -(-steps // steps_per_epoch)
        self._started = time.monotonic()
        self._losses: list[float] = []

    def loss(self, nats: float) -> None:
        self._losses.append(nats)

    def step(self, step: int) -> None:
        if step % self._per_epoch and step < self._steps:
            return
        epoch = -(-step // self._per_epoch)
        mean = sum(self._losses) / len(self._losses)
        left_s = (time.monotonic() - self._started) / (step - self._first) * (self._steps - step)
        left = tqdm.format_interval(left_s)
        tqdm.write(f"{self._name}: epoch {epoch} of {self._epochs}, loss {mean:.3f}, {left} left")
        self._losses.clear()
