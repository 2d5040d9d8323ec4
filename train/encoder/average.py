"""The mean of the weights of all steps of a training. Knows nothing of models or losses.

Averaging smooths what single batches do to the weights (Polyak and Juditsky, 1992). Later steps
weigh more, the step t as t (t + 1) (t + 2): polynomial-decay averaging (Shamir and Zhang, 2013,
section 4); docs/lessons.md compares decays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

DECAY = 3


class AveragedWeights:
    """The mean of `weights`, which training changes in place."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = [weight.detach() for weight in weights]
        self.means = [weight.clone() for weight in self._weights]

    def update(self, step: int) -> None:
        """Count the weights as they are after step `step`, the first of which is 1."""
        torch._foreach_lerp_(self.means, self._weights, (DECAY + 1) / (DECAY + step))

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
