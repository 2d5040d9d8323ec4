"""Which validation rows a threshold is for, and whether they are enough for the rule's rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from guard.errors import GuardError

OWN_ROWS = 2  # own validation rows of either label: with fewer, generated ones count too


def check_rows_for_rate(allowed: int, max_fpr: float | None, *, where: object = None) -> None:
    """Raise GuardError where `allowed` validation rows are too few for the rule's `max_fpr`."""
    if max_fpr is not None and not _has_rows_for_rate(allowed, max_fpr):
        raise GuardError(
            "too few allowed validation rows for the rule's max_fpr",
            where=where,
            got=f"{allowed} rows, max_fpr {max_fpr:g}",
            remedy=f"Have at least {math.ceil(1 / max_fpr)} such rows, or raise max_fpr in the "
            "rule's file, or leave it out there",
        )


def own_rows_decide(
    labels: Sequence[int], is_generated: Sequence[bool], max_fpr: float | None
) -> bool:
    """Whether the own validation rows alone decide, since deployed traffic is like these: if there
    are both sorts, and enough own ones.
    """
    own_labels: list[int] = []
    for label, generated in zip(labels, is_generated, strict=True):
        if not generated:
            own_labels.append(label)
    violating = sum(own_labels)
    allowed = len(own_labels) - violating
    is_mixed = 0 < len(own_labels) < len(labels)
    has_rows_for_rate = max_fpr is None or _has_rows_for_rate(allowed, max_fpr)
    return is_mixed and min(violating, allowed) >= OWN_ROWS and has_rows_for_rate


def for_calibration(
    logits: Sequence[float],
    labels: Sequence[int],
    is_generated: Sequence[bool],
    max_fpr: float | None,
) -> tuple[list[float], list[int]]:
    chosen = list(range(len(labels)))
    if own_rows_decide(labels, is_generated, max_fpr):
        chosen = [index for index in chosen if not is_generated[index]]
    return [logits[index] for index in chosen], [labels[index] for index in chosen]


def _has_rows_for_rate(allowed: int, max_fpr: float) -> bool:
    """Whether at least one row may be flagged."""
    return allowed * max_fpr >= 1
