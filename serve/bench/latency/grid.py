"""The points that the latency benchmark measures. Knows nothing of engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from guard.method import METHODS

BASE = "base"  # the mode without adapters; the others are methods
RULES_OF_LENGTH_SWEEP = 5
LENGTHS_OF_RULES_SWEEP = (1000, 5000)
LENGTHS = (100, 250, 500, 1000, 2000, 5000)
LONG = (10_000, 20_000, 32_000)
LONG_REPEATS = 3
LORA_REPEATS = 5  # at most: with a hundred rules LoRA takes a hundred times as long as the rest
RULES = (1, 5, 10, 20, 50, 100)
MANY_RULES = ((1000, 200), (1000, 500))  # tokens, rules
QUICK_POINTS = ((100, 5), (1000, 1), (1000, 5), (5000, 5), (1000, 20), (1000, 100))
QUICK_REPEATS = 2
SUFFIX_TOKENS = 50  # about how many a rule's suffix has; for the progress bar


def shares_conversation(mode: str) -> bool:
    """Whether a mode prefills a conversation once, however many rules there are."""
    return mode == BASE or METHODS[mode].shares_conversation


def method_that_shares(modes: Iterable[str]) -> str | None:
    """The first method that prefills a conversation once for all rules; None if there is none."""
    methods = [mode for mode in modes if mode != BASE]
    return next((name for name in methods if shares_conversation(name)), None)


def method_that_repeats(modes: Iterable[str]) -> str | None:
    """The first method that prefills a conversation for every rule; None if there is none."""
    return next((mode for mode in modes if not shares_conversation(mode)), None)


def label_of(mode: str) -> str:
    """A mode's name in tables and plots."""
    if mode == BASE:
        return "bare base"
    return METHODS[mode].label


@dataclass(frozen=True)
class Cell:
    """A point of the grid. `optional`: measured only if enough time is left."""

    prompt_tokens: int
    rules: int
    repeats: int
    optional: bool = False

    def times(self, mode: str) -> int:
        """The number of repeats, counted from the first, in which the mode is measured."""
        if shares_conversation(mode):
            return self.repeats
        return min(self.repeats, LORA_REPEATS)

    def tokens(self, mode: str) -> int:
        """The approximate number of tokens that one repeat computes."""
        suffixes = SUFFIX_TOKENS * self.rules
        if shares_conversation(mode):
            return self.prompt_tokens + suffixes
        return self.rules * self.prompt_tokens + suffixes

    def all_tokens(self, modes: Sequence[str]) -> int:
        """The approximate number of tokens that all repeats of these modes compute."""
        return sum(self.times(mode) * self.tokens(mode) for mode in modes)

    def length(self, number: int, block: int) -> int:
        """The tokens of repeat `number`: at most half a block more or less than the cell's. The
        remainders of the repeats are spread evenly over a block.

        The base computes what the conversation has beyond whole blocks again for every rule, so a
        single length would favour it or put it at a disadvantage.
        """
        wanted_remainder = int((number % self.repeats + 0.5) / self.repeats * block)
        return _nearest_length(self.prompt_tokens, wanted_remainder, block)


def _nearest_length(tokens: int, remainder: int, block: int) -> int:
    """The length nearest to `tokens` that has `remainder` tokens beyond whole blocks."""
    shortest = tokens - block // 2
    until_remainder = (remainder - shortest) % block
    return shortest + until_remainder


def full_grid(repeats: int, *, wide: bool = False) -> list[Cell]:
    """Both sweeps, the cheapest cells first.

    `wide`: adds far more rules and far longer conversations.
    """
    points = {(length, RULES_OF_LENGTH_SWEEP) for length in LENGTHS}
    for length in LENGTHS_OF_RULES_SWEEP:
        points |= {(length, rules) for rules in RULES}
    cells = [Cell(*point, repeats) for point in points]
    if wide:
        cells += [Cell(*point, repeats) for point in MANY_RULES]
        long_repeats = min(repeats, LONG_REPEATS)
        cells += [Cell(length, RULES_OF_LENGTH_SWEEP, long_repeats) for length in LONG]
    return sorted(cells, key=lambda cell: cell.rules * (cell.prompt_tokens + SUFFIX_TOKENS))


def quick_grid(repeats: int) -> list[Cell]:
    """The coarse grid, the cheapest cells first."""
    cells = [Cell(*point, min(repeats, QUICK_REPEATS)) for point in QUICK_POINTS]
    return [*cells, Cell(5000, 100, 1, optional=True)]


def by_engine(grid: Sequence[Cell]) -> list[list[Cell]]:
    """The grid in parts, each measured in an engine of its own.

    Conversations longer than the sweeps' need memory that would change the other measurements.
    """
    parts: dict[bool, list[Cell]] = {}
    for cell in grid:
        parts.setdefault(cell.prompt_tokens > max(LENGTHS), []).append(cell)
    return list(parts.values())
