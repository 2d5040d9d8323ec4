"""From two logits to a verdict. Knows nothing of where the logits come from."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """One rule's answer on one conversation.

    `logit` is log P(yes) - log P(no) at the verdict token, in nats, uncalibrated. `p_violation` is calibrated. `sure`: it lies outside
    the band about the threshold in which the adapter was too often wrong on its validation split.
    """

    rule: str
    logit: float
    p_violation: float
    threshold: float
    sure: bool = True

    @property
    def violates(self) -> bool:
        """Whether the calibrated probability reaches the rule's threshold."""
        return self.p_violation >= self.threshold


@dataclass(frozen=True)
class Calibration:
    """How a raw logit becomes a probability and a decision.

    p = sigmoid(logit / temperature + bias): temperature scaling (Guo et al., 2017) without a bias, else Platt's (1999). Probabilities
    from `unsure[0]` to `unsure[1]` are too near to the threshold for a verdict that means much; equal bounds are no band.
    """

    temperature: float = 1.0
    threshold: float = 0.5
    bias: float = 0.0
    unsure: tuple[float, float] = (0.5, 0.5)

    def __post_init__(self) -> None:
        # Written so that a NaN fails too: a NaN threshold would read as "allow" for every conversation.
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"the temperature must be positive and finite, got {self.temperature}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"the threshold must be a probability, got {self.threshold}")
        if not abs(self.bias) < math.inf:
            raise ValueError(f"the bias must be finite, got {self.bias}")
        if not 0 <= self.unsure[0] <= self.unsure[1] <= 1:
            raise ValueError(f"the unsure band must be two probabilities in order, got {self.unsure}")

    def p_violation(self, logit: float) -> float:
        """Calibrated probability that the rule is violated. Raises ValueError on a NaN: it must never read as "allow"."""
        if math.isnan(logit):
            raise ValueError("the verdict logit is NaN")
        scaled = max(-60.0, min(60.0, logit / self.temperature + self.bias))
        return 1.0 / (1.0 + math.exp(-scaled))

    def _doubts(self, p_violation: float) -> bool:
        low, high = self.unsure
        return low < high and low <= p_violation <= high

    def verdict(self, rule: str, logit: float) -> Verdict:
        """The decision on `logit` for `rule`."""
        p = self.p_violation(logit)
        return Verdict(rule, logit, p, self.threshold, sure=not self._doubts(p))
