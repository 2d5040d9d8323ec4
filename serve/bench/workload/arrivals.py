"""Conversations of real lengths that arrive by a Poisson process. Knows nothing of engines."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from guard.conversation.example import Message
from guard.prompt.decoder import PromptBuilder
from serve.bench.workload.prompts import conversation
from serve.bench.workload.traffic import poisson

RULES = (5, 20)  # of a conversation, least and most
# The 0, 5, 10, … 100 % quantiles of the prompts' lengths in the tiny base's tokens:
# of every eighth of SGD's 17,193 dialogues (Rastogi et al., 2020).
# fmt: off
LENGTHS = (87, 163, 185, 206, 221, 236, 251, 265, 278, 289, 302, 315, 326, 339, 354, 371, 392, 416,
           443, 490, 740)
# fmt: on


@dataclass(frozen=True)
class Arrival:
    """A conversation, the time when it arrives from the start, and the numbers of its rules."""

    messages: tuple[Message, ...]
    due_s: float
    rules: tuple[int, ...]


def arrivals(
    prompts: PromptBuilder, rate: float, checks: int, seed: int, rules: tuple[int, int] = RULES
) -> list[Arrival]:
    """Draw conversations of real lengths that arrive by a Poisson process of `rate` a second.

    No two seeds have a conversation in common. `rules`: the least and the most rules of a
    conversation; there are as many rules as the most.
    """
    least, most = rules
    draw = random.Random(seed)
    quantiles = np.linspace(0, 100, len(LENGTHS))
    lengths = [
        round(float(np.interp(draw.uniform(0, 100), quantiles, LENGTHS))) for _ in range(checks)
    ]
    drawn = []
    for number, due_s in enumerate(poisson(rate, checks, seed)):
        messages = conversation(prompts, lengths[number], (seed << 32) + number)
        count = draw.randint(least, most)
        drawn.append(Arrival(messages, due_s, tuple(draw.sample(range(most), count))))
    return drawn
