"""Of a data set with generated rows and one's own: which of them a threshold is for.

Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence

OWN_ROWS = 2  # validation rows of one's own of either label: with fewer, generated ones count too


def own_rows_decide(
    labels: Sequence[int], is_generated: Sequence[bool], max_fpr: float | None
) -> bool:
    """Whether thresholds and probabilities are for one's own validation rows alone, as what is
    deployed judges such ones: where there are both sorts, and enough of one's own.

    `max_fpr` is the rule's: a rate needs a row to be a share of.
    """
    own_labels: list[int] = []
    for label, generated in zip(labels, is_generated, strict=True):
        if not generated:
            own_labels.append(label)
    violating = sum(own_labels)
    allowed = len(own_labels) - violating
    is_mixed = 0 < len(own_labels) < len(labels)
    has_rows_for_rate = max_fpr is None or allowed * max_fpr >= 1
    return is_mixed and min(violating, allowed) >= OWN_ROWS and has_rows_for_rate


def for_calibration(
    logits: Sequence[float],
    labels: Sequence[int],
    is_generated: Sequence[bool],
    max_fpr: float | None,
) -> tuple[list[float], list[int]]:
    """The logits and labels of the validation rows to calibrate on."""
    chosen = list(range(len(labels)))
    if own_rows_decide(labels, is_generated, max_fpr):
        chosen = [index for index in chosen if not is_generated[index]]
    return [logits[index] for index in chosen], [labels[index] for index in chosen]
