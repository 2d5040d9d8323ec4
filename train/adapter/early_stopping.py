"""The weights with the lowest validation loss, and when to give up on a lower one. A training is
evaluated after each epoch or every so many steps. Knows nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from guard.files.atomic import atomic_write

FILE = "best_weights.pt"


class EarlyStopping:
    """Keeps the best evaluation's weights and every evaluation's validation loss in `folder`. So a
    resumed run decides as an uninterrupted one. A step that is recorded is left as it is; a resumed
    run may compute it again.
    """

    def __init__(self, folder: Path, patience: int, min_steps: int = 0) -> None:
        self._file = folder / FILE
        self._patience = patience
        self._min_steps = min_steps
        self._state: dict[str, Any] = {"losses": {}, "weights": [], "logits": []}
        if self._file.is_file():
            self._state = torch.load(self._file, weights_only=True)

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
            self._state["weights"] = [weight.detach().cpu().clone() for weight in weights]
            self._state["logits"] = list(logits)
        with atomic_write(self._file) as part:
            torch.save(self._state, part)

    @staticmethod
    def discard(folder: Path) -> None:
        (folder / FILE).unlink(missing_ok=True)

    @property
    def best_step(self) -> int:
        return _best(self._losses)

    @property
    def best_logits(self) -> Sequence[float]:
        logits: list[float] = self._state["logits"]
        return logits

    def ended(self, step: int) -> bool:
        """Whether after the least steps `patience` evaluations brought no lower loss by `step`."""
        if step < self._min_steps:
            return False
        losses = {at: loss for at, loss in self._losses.items() if at <= step}
        best = _best(losses)
        return sum(at > best for at in losses) >= self._patience

    def restore(self, weights: Sequence[Tensor]) -> None:
        """Put the best weights into `weights`; leave these if nothing was recorded."""
        for weight, best in zip(weights, self._state["weights"] or weights, strict=True):
            weight.data.copy_(best)

    @property
    def _losses(self) -> dict[int, float]:
        losses: dict[int, float] = self._state["losses"]
        return losses


def _best(losses: dict[int, float]) -> int:
    """The step with the lowest loss, the first of equal ones; 0 if there is none."""
    return min(losses, key=lambda step: (losses[step], step), default=0)
