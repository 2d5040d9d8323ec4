"""What a step of the engine takes, from what it computes. Knows nothing of who asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass
class StepWork:
    """What one step computes, or several steps together; the simulation counts it.

    `adapted` are tokens under an adapter, `pairs` pairs of a token and one that it attends to,
    `reads` tokens of earlier context that the step's sequences read, once a sequence.
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
    """How long a device takes. `wake_ms`: what a check takes longer that finds it asleep."""

    @property
    def wake_ms(self) -> float:
        """In ms."""
        ...

    def step_ms(self, work: StepWork) -> float:
        """A step of this work, its adapters' copies and loads included."""
        ...

    def submit_ms(self, tokens: int, rules: int) -> float:
        """To put a check into the engine: its tokenising and its requests."""
        ...
