"""A training loop that can be interrupted: learning rates, steps and checkpoints. Knows nothing of
what is trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from guard.errors import GuardError
from guard.files.atomic import atomic_write

WARM_UP = 60  # steps
WEIGHT_DECAY = 0.05
BETAS = (0.9, 0.95)  # of AdamW
SAVE_EVERY = 50  # steps


@dataclass(frozen=True)
class Checkpoint:
    """A file with the state of a run that can go on, and what it was made from: values by name, or
    one fingerprint.
    """

    file: Path
    made_from: dict[str, Any] | str

    def read(self) -> dict[str, Any] | None:
        """The state, None if there is no file. Raises GuardError if it was made from something
        else.
        """
        if not self.file.is_file():
            return None
        state: dict[str, Any] = torch.load(self.file, weights_only=True, map_location="cpu")
        made_from = state.get("made_from", {})
        if made_from != self.made_from:
            self._refuse(made_from)
        return state

    def _refuse(self, made_from: Any) -> None:
        """Refuse the checkpoint: with other data it would become neither the old model nor a new
        one.
        """
        differing = None
        if isinstance(self.made_from, dict) and isinstance(made_from, dict):
            names = [name for name, value in self.made_from.items() if made_from.get(name) != value]
            differing = f"other {', '.join(names)}"
        raise GuardError(
            "the checkpoint of an earlier run was made from something else",
            where=self.file,
            got=differing,
            remedy="Repeat the command it was made with, delete it to start anew, "
            "or choose another folder with --work",
        )

    def write(self, learner: Learner, steps: int) -> None:
        """Save the learner after so many steps."""
        state = {
            learner.weights_name: learner.model.state_dict(),
            "optimizer": learner.optimizer.state_dict(),
            "made_from": self.made_from,
            "step": steps,
            **learner.progress(),
        }
        with atomic_write(self.file) as part:
            torch.save(state, part)


class Learner(ABC):
    """A model, its optimizer and what one step of training is. `figures`: running means of what the
    steps report.
    """

    name: str  # of the progress bar
    weights_name: str  # of the model in a checkpoint
    newest_share: float  # of a step in the running means
    model: nn.Module
    optimizer: torch.optim.Optimizer
    figures: dict[str, float]

    @abstractmethod
    def gradients(self, step: int) -> dict[str, float]:
        """Leave the gradients of this step, counted from 0, in the weights; return the figures to
        report.
        """

    @abstractmethod
    def clip(self) -> None:
        """Bound the gradients."""

    @abstractmethod
    def learning_rates(self, step: int) -> Sequence[float]:
        """The learning rates of this step, one for each group of the optimizer."""

    @abstractmethod
    def progress(self) -> dict[str, Any]:
        """The part of a checkpoint besides weights and optimizer."""

    @abstractmethod
    def restore_progress(self, state: dict[str, Any]) -> None:
        """Go on from what `progress` gave."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self.model.load_state_dict(state[self.weights_name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.restore_progress(state)

    def update(self, step: int) -> None:
        """Take one optimizer step."""
        figures = self.gradients(step)
        self.clip()
        rates = self.learning_rates(step)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for name, value in figures.items():
            mean = self.figures.get(name, value)
            self.figures[name] = (1 - self.newest_share) * mean + self.newest_share * value


def train(
    learner: Learner,
    checkpoint: Checkpoint,
    *,
    steps: int,
    stop_after: int | None = None,
    save_every: int = SAVE_EVERY,
) -> int:
    """Train up to step `steps`, or only to `stop_after`; goes on from the checkpoint if there is
    one, and saves to it.

    The steps that the learner has then had. Raises GuardError if the checkpoint was made from
    something else.
    """
    start = 0
    state = checkpoint.read()
    if state is not None:
        learner.restore(state)
        start = state["step"]
    end = max(start, stop_after or steps)
    bar = tqdm(
        range(start, end),
        initial=start,
        total=steps,
        desc=learner.name,
        unit="step",
        mininterval=20,
    )
    for step in bar:
        learner.update(step)
        figures = {name: f"{mean:.3f}" for name, mean in learner.figures.items()}
        bar.set_postfix(figures, refresh=False)
        if (step + 1) % save_every == 0 or step + 1 == end:
            checkpoint.write(learner, step + 1)
    return end


def share_of_peak(step: int, steps: int, *, first: int = 0) -> float:
    """The learning rate of a step by that at the peak: warm-up from step `first` on, plateau, decay
    over the last third.

    A plateau, so that a longer run can go on from any checkpoint.
    """
    return min((step + 1 - first) / WARM_UP, 1.0, 3 * (steps - step) / steps)


def parameter_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """What is trained of `parameters` as an optimizer takes it: the matrices, which decay, and the
    vectors, which do not.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim == 1]
    return [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
