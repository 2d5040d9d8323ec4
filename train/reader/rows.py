"""The reader's rows as a model sees them, and the steps they make. Knows nothing of tensors."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guard.conversation.example import Message
from guard.prompt.decoder import PromptBuilder

LONGEST_PREFIX = 450  # tokens; units with longer conversations are left out
STEP_TOKENS = 1536  # padded tokens of a step's suffixes
POOL = 1024  # units among which those with suffixes of like length are put together
SHORT_SUFFIX = 32  # tokens
FIRST = 2 / 3  # of the steps with short suffixes come first


@dataclass(frozen=True)
class TokenUnit:
    """A unit: prefixes of conversations, and the suffix of a policy for each label. `stands_on`:
    on which of the prefixes each suffix stands.
    """

    prefixes: tuple[tuple[int, ...], ...]
    stands_on: tuple[int, ...]
    suffixes: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]
    source: str
    conversations: tuple[tuple[Message, ...], ...]

    @property
    def longest(self) -> int:
        return max(map(len, self.suffixes))


def read(file: Path, builder: PromptBuilder) -> list[TokenUnit]:
    """The units that `make reader FROM=CLONES` wrote into a file."""
    units: list[TokenUnit] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        unit = json.loads(line)
        tokenised = _tokenised(unit, builder)
        if max(map(len, tokenised.prefixes)) <= LONGEST_PREFIX:
            units.append(tokenised)
    return units


def _tokenised(unit: dict[str, Any], builder: PromptBuilder) -> TokenUnit:
    conversations: list[tuple[Message, ...]] = []
    for messages in unit["conversations"]:
        conversations.append(tuple(Message(**message) for message in messages))
    texts = [tuple(builder.suffix_ids(text)) for text in unit["policies"]]
    stands_on: list[int] = []
    suffixes: list[tuple[int, ...]] = []
    flat: list[int] = []
    for number, of_policies in enumerate(unit["labels"]):
        stands_on += [number] * len(of_policies)
        suffixes += texts
        flat += of_policies
    return TokenUnit(
        tuple(tuple(builder.prefix_ids(messages)) for messages in conversations),
        tuple(stands_on),
        tuple(suffixes),
        tuple(flat),
        unit["source"],
        tuple(conversations),
    )


def steps(units: Sequence[TokenUnit], seed: int) -> list[list[TokenUnit]]:
    """Each unit once, those with suffixes of like length together, in random order. Most short ones
    come first: on all lengths at once nothing is learned for hundreds of steps (docs/lessons.md).
    """
    rng = random.Random(seed)
    shuffled = list(units)
    rng.shuffle(shuffled)
    batches: list[list[TokenUnit]] = []
    for start in range(0, len(shuffled), POOL):
        batches += packed(shuffled[start : start + POOL])
    rng.shuffle(batches)
    short = [batch for batch in batches if max(unit.longest for unit in batch) <= SHORT_SUFFIX]
    first = short[: int(len(short) * FIRST)]
    return [*first, *(batch for batch in batches if batch not in first)]


def packed(units: Sequence[TokenUnit]) -> Iterator[list[TokenUnit]]:
    """Units of like length that go through the model at once, the shortest first."""
    batch: list[TokenUnit] = []
    for unit in sorted(units, key=lambda unit: unit.longest):
        suffixes = sum(len(member.suffixes) for member in (*batch, unit))
        if batch and unit.longest * suffixes > STEP_TOKENS:
            yield batch
            batch = []
        batch.append(unit)
    if batch:
        yield batch
