"""Which validation rows a threshold is for, and whether they are enough for the rule's rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from guard.errors import GuardError
from guard.rule import Rule

# By the rule's key, the rows of which a share may be flagged.
BOUNDED = {"max_fpr": "allowed validation rows", "max_fpr_twins": "validation twins"}
OWN_ROWS = 2  # own validation rows of either label: with fewer, generated ones count too


class LabelledRow(Protocol):
    """What calibration asks of a row."""

    @property
    def label(self) -> int: ...

    @property
    def is_generated(self) -> bool: ...

    @property
    def is_twin(self) -> bool: ...


def check_rows(rows: Sequence[LabelledRow], rule: Rule, *, where: object) -> None:
    """Raise GuardError if these validation rows are too few for a rate that the rule states."""
    allowed = sum(not row.label for row in rows)
    check_rows_for_rate(allowed, rule.max_fpr, "max_fpr", where=where)
    twins = sum(row.is_twin for row in rows)
    check_rows_for_rate(twins, rule.max_fpr_twins, "max_fpr_twins", where=where)


def check_rows_for_rate(rows: int, rate: float | None, key: str, *, where: object = None) -> None:
    """Raise GuardError if so many rows are too few for the rate that the rule's `key` states."""
    if rate is not None and not _are_enough(rows, rate):
        problem = f"too few {BOUNDED[key]} for the rule's {key}"
        got = f"{rows} rows, {key} {rate:g}"
        fewest = math.ceil(1 / rate)
        remedy = f"Have at least {fewest}, or raise {key} in the rule's file, or leave it out"
        raise GuardError(problem, where=where, got=got, remedy=remedy)


def own_rows_decide(rows: Sequence[LabelledRow], max_fpr: float | None) -> bool:
    """Whether own rows alone decide, which deployed traffic is like: if there are enough."""
    own_labels = [row.label for row in rows if not row.is_generated]
    violating = sum(own_labels)
    allowed = len(own_labels) - violating
    is_mixed = len(own_labels) < len(rows)
    return is_mixed and min(violating, allowed) >= OWN_ROWS and _are_enough(allowed, max_fpr)


def for_calibration(
    logits: Sequence[float], rows: Sequence[LabelledRow], max_fpr: float | None
) -> tuple[list[float], list[int]]:
    """The logits and labels of the rows that decide."""
    chosen = list(zip(logits, rows, strict=True))
    if own_rows_decide(rows, max_fpr):
        chosen = [(logit, row) for logit, row in chosen if not row.is_generated]
    return [logit for logit, _ in chosen], [row.label for _, row in chosen]


def _are_enough(allowed: int, max_fpr: float | None) -> bool:
    return max_fpr is None or allowed * max_fpr >= 1
