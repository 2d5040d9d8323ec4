"""Which validation rows a threshold is for, and whether they are enough for the rule's rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from guard.errors import GuardError

OWN_ROWS = 2  # own validation rows of either label: with fewer, generated ones count too


def check_rows_for_rate(allowed: int, max_fpr: float | None, *, where: object = None) -> None:
    if max_fpr is not None and not _are_enough(allowed, max_fpr):
        problem = "too few allowed validation rows for the rule's max_fpr"
        got = f"{allowed} rows, max_fpr {max_fpr:g}"
        fewest = math.ceil(1 / max_fpr)
        remedy = f"Have at least {fewest}, or raise max_fpr in the rule's file, or leave it out"
        raise GuardError(problem, where=where, got=got, remedy=remedy)


def own_rows_decide(
    labels: Sequence[int], is_generated: Sequence[bool], max_fpr: float | None
) -> bool:
    """Whether own rows alone decide, which deployed traffic is like: if there are enough."""
    rows = zip(labels, is_generated, strict=True)
    own_labels = [label for label, generated in rows if not generated]
    violating = sum(own_labels)
    allowed = len(own_labels) - violating
    is_mixed = len(own_labels) < len(labels)
    return is_mixed and min(violating, allowed) >= OWN_ROWS and _are_enough(allowed, max_fpr)


def for_calibration(
    logits: Sequence[float],
    labels: Sequence[int],
    is_generated: Sequence[bool],
    max_fpr: float | None,
) -> tuple[list[float], list[int]]:
    if not own_rows_decide(labels, is_generated, max_fpr):
        return list(logits), list(labels)
    chosen = [index for index, generated in enumerate(is_generated) if not generated]
    return [logits[index] for index in chosen], [labels[index] for index in chosen]


def _are_enough(allowed: int, max_fpr: float | None) -> bool:
    return max_fpr is None or allowed * max_fpr >= 1
