"""Toy rows whose label a word tells, in one turn or another."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from guard.conversation.example import Example, Message, Split

NOISE = [f"{first}{second}" for first, second in itertools.product("bcdfgh", "aeiou")]


def rows(
    split: Split, turns: Callable[[int, list[str]], list[Message]], n: int = 60
) -> list[Example]:
    """Rows of alternating labels; `turns` writes one from its label and some noise."""
    rng = np.random.default_rng(len(split))
    return [
        Example(
            id=f"{split}{number}",
            rule="toy",
            messages=tuple(turns(number % 2, rng.choice(NOISE, 3).tolist())),
            label=number % 2,
            split=split,
            source="toy",
            group=f"{split}{number}",
        )
        for number in range(n)
    ]


def early(label: int, noise: list[str]) -> list[Message]:
    """The user's first turn tells; the assistant, who is judged, and the last turn do not."""
    word = ("plain", "secret")[label]
    return [
        Message("user", f"{noise[0]} {word}"),
        Message("assistant", f"{noise[1]} {noise[2]}"),
        Message("user", noise[0]),
    ]


def judged(label: int, noise: list[str]) -> list[Message]:
    """The assistant's first turn tells; others say the same words at random, and last."""
    word, decoy = ("plain", "secret")[label], ("plain", "secret")[noise[0] < "d"]
    return [
        Message("user", f"{decoy} {decoy} {decoy}"),
        Message("assistant", f"{noise[1]} {word}"),
        Message("assistant", noise[0]),
        Message("user", f"{decoy} {noise[2]}"),
    ]


def last(label: int, noise: list[str]) -> list[Message]:
    """The assistant's last turn tells; his first says the same words at random."""
    word, decoy = ("plain", "secret")[label], ("plain", "secret")[noise[0] < "d"]
    return [
        Message("assistant", f"{decoy} {decoy} {decoy}"),
        Message("user", decoy),
        Message("assistant", f"{noise[1]} {word}"),
    ]


def only(label: int, noise: list[str]) -> list[Message]:
    """One turn that tells: every view is the same, and every strength is enough."""
    return [Message("assistant", ("plain", "secret")[label])]
