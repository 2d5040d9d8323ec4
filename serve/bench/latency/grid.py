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
LORA_REPEATS = 5  # at most: with a hundred rules it takes a hundred times as long as the rest
RULES = (1, 5, 10, 20, 50, 100)
MANY_RULES = ((1000, 200), (1000, 500))  # tokens, rules
QUICK_POINTS = ((100, 5), (1000, 1), (1000, 5), (5000, 5), (1000, 20), (1000, 100))
QUICK_REPEATS = 2
SUFFIX_TOKENS = 50  # of a rule, about; for the progress bar


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
    """A point of the grid. `optional`: measured only if the time that is left allows."""

    prompt_tokens: int
    rules: int
    repeats: int
    optional: bool = False

    def times(self, mode: str) -> int:
        """In how many of the repeats the mode is measured: the first ones."""
        if shares_conversation(mode):
            return self.repeats
        return min(self.repeats, LORA_REPEATS)

    def tokens(self, mode: str) -> int:
        """About how many tokens one repeat must compute."""
        suffixes = SUFFIX_TOKENS * self.rules
        if shares_conversation(mode):
            return self.prompt_tokens + suffixes
        return self.rules * self.prompt_tokens + suffixes

    def all_tokens(self, modes: Sequence[str]) -> int:
        """About how many tokens all repeats of these modes must compute."""
        return sum(self.times(mode) * self.tokens(mode) for mode in modes)

    def length(self, number: int, block: int) -> int:
        """The tokens of repeat `number`.

        At most half a block from the cell's, with remainders spread evenly over a block.

        The base computes again for every rule what the conversation has beyond whole blocks, so one
        length would flatter it or wrong it.
        """
        remainder = int((number % self.repeats + 0.5) / self.repeats * block)
        offset = (remainder - self.prompt_tokens + block // 2) % block - block // 2
        return self.prompt_tokens + offset


def full_grid(repeats: int, *, wide: bool = False) -> list[Cell]:
    """Both sweeps, the cheapest cells first.

    `wide`: and beyond them, far more rules and far longer conversations.
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
    """The grid in parts that are measured in an engine each.

    Conversations beyond the sweeps take memory that the others should not see.
    """
    parts: dict[bool, list[Cell]] = {}
    for cell in grid:
        parts.setdefault(cell.prompt_tokens > max(LENGTHS), []).append(cell)
    return list(parts.values())
