"""The epoch with the lowest validation loss, and when to give up on a lower one. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from guard.files.atomic import atomic_write

FILE = "best_epoch.pt"


class EarlyStopping:
    """Keeps the best epoch's weights and every epoch's validation loss in `folder`, so that a resumed run decides as an uninterrupted one.

    A run that is resumed before an epoch already recorded computes it again, with the same result, and records it again.
    """

    def __init__(self, folder: Path, patience: int) -> None:
        self._file, self._patience = folder / FILE, patience
        self._state = (
            torch.load(self._file, weights_only=True)
            if self._file.is_file()
            else {"losses": {}, "weights": []}
        )

    def record(self, step: int, loss: float, weights: Sequence[Tensor]) -> None:
        """The validation loss in nats and the weights at the end of an epoch, after `step` steps."""
        losses: dict[int, float] = self._state["losses"]
        losses[step] = loss
        if min(losses, key=lambda at: (losses[at], at)) == step:
            self._state["weights"] = [weight.detach().cpu().clone() for weight in weights]
        with atomic_write(self._file) as part:
            torch.save(self._state, part)

    def ended(self, step: int) -> bool:
        """Whether the epochs up to `step` have had their chance."""
        losses: dict[int, float] = {
            at: loss for at, loss in self._state["losses"].items() if at <= step
        }
        best = min(losses, key=lambda at: (losses[at], at), default=0)
        return sum(at > best for at in losses) >= self._patience

    def restore(self, weights: Sequence[Tensor]) -> None:
        """Put the best epoch's weights into `weights`; leave them if no epoch was recorded."""
        for weight, best in zip(weights, self._state["weights"] or weights, strict=True):
            weight.data.copy_(best)


def validation_loss(logits: Sequence[float], labels: Sequence[int]) -> float:
    """Mean negative log-likelihood in nats of verdict logits (log P(yes) - log P(no)) and labels (1 = violates)."""
    x, y = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    return float(np.logaddexp(0.0, np.where(y == 1, -x, x)).mean())
