"""The time that a step of the engine takes, from what it computes. Knows nothing of checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass
class StepWork:
    """The work of one step, or of several together, as the simulation counts it.

    `adapted`: tokens under an adapter. `pairs`: pairs of a token and one that it attends to.
    `reads`: tokens of earlier context that the step's sequences read, counted for each sequence.
    """

    steps: int = 0
    tokens: int = 0
    adapted: int = 0
    pairs: float = 0.0
    reads: int = 0
    sequences: int = 0
    swap_ins: int = 0
    loads: int = 0

    def add(self, addend: StepWork) -> None:
        """Count another step's work too."""
        for name in vars(addend):
            setattr(self, name, getattr(self, name) + getattr(addend, name))


class StepCost(Protocol):
    """The times that a device takes."""

    @property
    def wake_ms(self) -> float:
        """The extra time of a check that finds the engine asleep."""
        ...

    def step_ms(self, work: StepWork) -> float:
        """The time of a step of this work, with the copies and loads of its adapters."""
        ...

    def submit_ms(self, tokens: int, rules: int) -> float:
        """The time to put a check into the engine: to tokenise it and submit its requests."""
        ...
