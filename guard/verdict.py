"""From two logits to a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from guard.coverage import ConversationForm, Coverage

ECE_BINS = 15  # Guo et al., 2017


class Verdict(NamedTuple):
    """One rule's answer on one conversation.

    `logit` is log P(yes) - log P(no) at the verdict token, or a head's, in nats, uncalibrated.
    `p_violation` is calibrated. `confident`: the validation rows covered such a conversation, and
    hardly any of them with such a logit was judged wrongly. `unseen_language`: those rows have no
    such language, so it is not confident. `by` is what answered (`Card.by`).
    """

    rule: str
    logit: float
    p_violation: float
    threshold: float
    confident: bool = True
    unseen_language: bool = False
    by: str = ""

    @property
    def violates(self) -> bool:
        return self.p_violation >= self.threshold

    @property
    def word(self) -> Literal["allow", "violation"]:
        if self.violates:
            return "violation"
        return "allow"


@dataclass(frozen=True)
class Calibration:
    """How a raw logit becomes a probability and a decision.

    p = sigmoid(logit / temperature + bias): temperature scaling (Guo et al., 2017) without a bias,
    else Platt's (1999). Probabilities from `uncertainty_band[0]` to `uncertainty_band[1]` are too
    near to the threshold for a verdict that means much; equal bounds are no band. `coverage` says
    on which conversations a verdict means anything; None: on all.
    """

    temperature: float = 1.0
    threshold: float = 0.5
    bias: float = 0.0
    uncertainty_band: tuple[float, float] = (0.5, 0.5)
    coverage: Coverage | None = None

    def __post_init__(self) -> None:
        # Written so that a NaN fails too: a NaN threshold would read as "allow" for every
        # conversation.
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"the temperature must be positive and finite, got {self.temperature}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"the threshold must be a probability, got {self.threshold}")
        if not abs(self.bias) < math.inf:
            raise ValueError(f"the bias must be finite, got {self.bias}")
        low, high = self.uncertainty_band
        if not 0 <= low <= high <= 1:
            raise ValueError(f"the band must be two probabilities in order, got {low}, {high}")

    def p_violation(self, logit: float) -> float:
        """Calibrated probability that the rule is violated. A NaN must never read as "allow"."""
        if math.isnan(logit):
            raise ValueError("the verdict logit is NaN")
        scaled = max(-60.0, min(60.0, logit / self.temperature + self.bias))
        return 1.0 / (1.0 + math.exp(-scaled))

    def _is_uncertain(self, p_violation: float) -> bool:
        low, high = self.uncertainty_band
        return low < high and low <= p_violation <= high

    def verdict(self, rule: str, logit: float, form: ConversationForm | None = None) -> Verdict:
        """The decision; without a `form` not confident where the coverage is known."""
        p = self.p_violation(logit)
        confident = not self._is_uncertain(p) and self._is_covered(p, logit, form)
        unseen = False
        if form is not None and self.coverage is not None:
            unseen = self.coverage.is_unseen_language(form)
        return Verdict(rule, logit, p, self.threshold, confident, unseen)

    def _is_covered(self, p: float, logit: float, form: ConversationForm | None) -> bool:
        if self.coverage is None or form is None:
            return self.coverage is None
        is_sure = p >= self.threshold or self.coverage.is_sure_allow(form, logit)
        return is_sure and self.coverage.has(form)


def expected_calibration_error(
    labels: Sequence[int], p_violation: Sequence[float], bins: int = ECE_BINS
) -> float | None:
    """Mean |share that violates - mean p_violation| over equal-width bins of p_violation, weighted
    by size (Naeini et al., 2015). None for no examples.
    """
    if not labels:
        return None
    p = np.asarray(p_violation)
    bin_of = np.minimum((p * bins).astype(int), bins - 1)
    return float(np.abs(np.bincount(bin_of, np.asarray(labels) - p)).sum() / len(p))
