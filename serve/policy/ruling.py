"""What is known of a rule, or of several together: three values, by Kleene's strong logic.

"Violation" is Kleene's true, "allow" his false, "unjudged" his unknown. So a result is "allow" or
"violation" only if no verdict that is missing could have changed it. Knows nothing of rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Ruling(StrEnum):
    """Whether a rule, a condition or a combination of them holds."""

    ALLOW = "allow"
    UNJUDGED = "unjudged"
    VIOLATION = "violation"

    @property
    def opposite(self) -> Ruling:
        """Kleene's not: what is unjudged stays so."""
        return _OPPOSITES[self]


_OPPOSITES = {
    Ruling.ALLOW: Ruling.VIOLATION,
    Ruling.UNJUDGED: Ruling.UNJUDGED,
    Ruling.VIOLATION: Ruling.ALLOW,
}
_RANKS = {ruling: rank for rank, ruling in enumerate(Ruling)}  # from false to true


def any_of(rulings: Iterable[Ruling]) -> Ruling:
    """Kleene's or. Raises ValueError for none: nothing that was asked is no "allow"."""
    return max(rulings, key=_RANKS.__getitem__)


def all_of(rulings: Iterable[Ruling]) -> Ruling:
    """Kleene's and. Raises ValueError for none."""
    return min(rulings, key=_RANKS.__getitem__)
