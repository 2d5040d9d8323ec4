"""Which rows a step is made of: those of like length, in an order that a resumed run has too. Knows
nothing of what the rows say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices


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
