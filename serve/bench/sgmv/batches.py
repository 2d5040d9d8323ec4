"""Steps of a fan-out and of a fleet: segments of tokens, each with an adapter.

Knows nothing of weights or operators.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class SgmvBatch:
    """A step's segments, each an adapter slot and a number of tokens, and the ranks of the adapters
    in the slots.
    """

    name: str
    segments: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens in the step."""
        return sum(length for _, length in self.segments)

    @property
    def slot_of_token(self) -> list[int]:
        """The adapter slot of every token."""
        slots: list[int] = []
        for slot, length in self.segments:
            slots += [slot] * length
        return slots


def batches(rank: int, suffix: int = 3) -> list[SgmvBatch]:
    """Typical steps of a fan-out and of a fleet.

    `rank`: the largest rank. `suffix`: the tokens of a rule.
    """
    slots = random.Random(0).sample(range(100), 100)
    lengths = random.Random(1).choices(range(15, 22), k=100)
    long_lengths = random.Random(2).choices(range(180, 221), k=16)
    mixed = tuple((rank, rank // 2, rank // 4)[slot % 3] for slot in range(100))
    in_order = tuple((slot, suffix) for slot in range(100))
    shuffled = tuple((slot, suffix) for slot in slots)
    loras = tuple((number % 4, length) for number, length in enumerate(long_lengths))
    mixed_name = f"the same, ranks {rank}, {rank // 2} and {rank // 4}"
    equal = (rank,) * 100
    return [
        SgmvBatch(f"100 adapters x {suffix} tokens", in_order, equal),
        SgmvBatch("the same, slots in any order", shuffled, equal),
        SgmvBatch(mixed_name, shuffled, mixed),
        SgmvBatch("100 adapters x 15 to 21 tokens", tuple(zip(slots, lengths, strict=True)), equal),
        SgmvBatch(f"12 conversations x 20 adapters x {suffix} tokens", shuffled[:20] * 12, equal),
        SgmvBatch("1 adapter x 1,000 tokens", ((0, 1000),), equal),
        SgmvBatch("4 LoRAs, round-robin, 16 x 180 to 220 tokens", loras, equal),
    ]
