"""How many replicas a command line asks for: `2`, or `1-4` for as many as the load needs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

MAX_REPLICAS = 256


@dataclass(frozen=True)
class ScalingPace:
    """How soon the number of replicas follows the load, in seconds. Every `every_s` the mean load
    over the last `look_back_s` is read; what it calls for during `up_s` or `down_s` is done.
    """

    every_s: float = 10.0
    look_back_s: float = 30.0
    up_s: float = 30.0
    down_s: float = 600.0


@dataclass(frozen=True)
class ReplicaRange:
    """A range of `low` to `high` replicas; a fixed number where both are the same."""

    low: int
    high: int
    pace: ScalingPace = ScalingPace()

    @property
    def is_fixed(self) -> bool:
        return self.low == self.high

    def scaled_down_after(self, down_s: float) -> ReplicaRange:
        return replace(self, pace=replace(self.pace, down_s=down_s))

    @classmethod
    def parse(cls, text: str) -> ReplicaRange:
        """`2` or `1-4`, for argparse. Raises ArgumentTypeError for what is neither."""
        first, dash, last = text.partition("-")
        numbers = [first, last] if dash else [first, first]
        if not all(number.isdecimal() and number.isascii() for number in numbers):
            raise argparse.ArgumentTypeError(f"must be a number such as 2 or 1-4, got {text!r}")
        low, high = (int(number) for number in numbers)
        if not 1 <= low <= high <= MAX_REPLICAS:
            problem = f"must be from 1 to {MAX_REPLICAS}, the smaller number first"
            raise argparse.ArgumentTypeError(f"{problem}, got {text!r}")
        return cls(low, high)
