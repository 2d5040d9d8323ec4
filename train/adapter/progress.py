"""How far each adapter's training is: one line an epoch, with the time left. Knows nothing of
models.
"""

from __future__ import annotations

import time

from tqdm import tqdm


class Progress:
    """Prints `name: epoch 2 of 4, loss 0.412, 3 min left` at the end of each epoch."""

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
        mean = ""
        if self._losses:
            mean = f", loss {sum(self._losses) / len(self._losses):.3f}"
        left = (time.monotonic() - self._started) / (step - self._first) * (self._steps - step)
        tqdm.write(f"{self._name}: epoch {epoch} of {self._epochs}{mean}, {duration(left)} left")
        self._losses.clear()


def duration(seconds: float) -> str:
    """`40 s`, `12 min` or `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
