"""What two versions say of the same conversations, in numbers: from the rows of a scan by both.

Knows nothing of engines, texts or pages.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
REASONS = 5  # of the unjudged, the commonest
FLIPS = {("allow", "violation"): "to_violation", ("violation", "allow"): "to_allow"}

Row = Mapping[str, Any]  # of `serve.scan.parts.ScanRow`, as it was read


@dataclass(frozen=True)
class CountedShare:
    """`count` of `total`, and the exact 95 % interval of the share (Clopper and Pearson, 1934).

    It takes conversations as drawn independently.
    """

    count: int
    total: int
    ci95: tuple[float, float]

    @classmethod
    def of(cls, count: int, total: int) -> CountedShare:
        """The share with its interval, which is 0 to 1 for a total of 0."""
        if total == 0:
            return cls(0, 0, (0.0, 1.0))
        interval = binomtest(count, total).proportion_ci(confidence_level=0.95, method="exact")
        return cls(count, total, (float(interval.low), float(interval.high)))

    @property
    def share(self) -> float:
        """The share, between 0 and 1; 0 for a total of 0."""
        return self.count / max(1, self.total)


@dataclass(frozen=True)
class ReplayedConversation:
    """The place of a conversation, and what both versions say of it."""

    source: str
    row: int
    id: str
    verdict_a: str
    verdict_b: str
    p_a: float
    p_b: float

    @property
    def change(self) -> float:
        """The difference of the probabilities of a violation, B less A."""
        return self.p_b - self.p_a


@dataclass(frozen=True)
class RuleReplay:
    """The comparison of one rule's two versions. `judged`: conversations of which both have a
    verdict; flips, flagged shares and quantiles are of these.

    `confident_flips` are those in which both verdicts are confident.
    `quantiles` are of B's probability minus A's, by their level; None where none is judged.
    `flipped` and `largest` begin with the largest change and are bounded.
    """

    rule: str
    conversations: int
    judged: int
    to_violation: CountedShare
    to_allow: CountedShare
    flips: CountedShare
    confident_flips: int
    flagged_a: CountedShare
    flagged_b: CountedShare
    unjudged_a_only: int
    unjudged_b_only: int
    unjudged_both: int
    reasons: Mapping[str, int]
    quantiles: Mapping[str, float] | None
    flipped: tuple[ReplayedConversation, ...]
    largest: tuple[ReplayedConversation, ...]


@dataclass(frozen=True)
class Probabilities:
    """The probabilities of every conversation that both versions judged, in the order of the
    traffic: float64 [judged]; `flips` is where their verdicts differ, bool [judged].
    """

    a: NDArray[np.float64]
    b: NDArray[np.float64]
    flips: NDArray[np.bool_]


@dataclass
class ReplayTally:
    """Counts one rule's rows, conversation by conversation, and keeps `shown` of each list."""

    rule: str
    shown: int
    conversations: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    p_a: array[float] = field(default_factory=lambda: array("d"))
    p_b: array[float] = field(default_factory=lambda: array("d"))
    is_flip: bytearray = field(default_factory=bytearray)
    _flipped: list[tuple[float, int, ReplayedConversation]] = field(default_factory=list)
    _largest: list[tuple[float, int, ReplayedConversation]] = field(default_factory=list)

    def add(self, a: Row, b: Row) -> None:
        """Count one more conversation's rows."""
        self.conversations += 1
        if a["verdict"] == "unjudged" or b["verdict"] == "unjudged":
            self._add_unjudged(a, b)
            return
        conversation = ReplayedConversation(
            a["source"],
            a["row"],
            a["id"],
            a["verdict"],
            b["verdict"],
            a["p_violation"],
            b["p_violation"],
        )
        self.p_a.append(conversation.p_a)
        self.p_b.append(conversation.p_b)
        self.counts["flagged_a"] += a["verdict"] == "violation"
        self.counts["flagged_b"] += b["verdict"] == "violation"
        flip = FLIPS.get((a["verdict"], b["verdict"]))
        self.is_flip.append(flip is not None)
        self._keep(self._largest, conversation)
        if flip is not None:
            self.counts[flip] += 1
            self.counts["confident"] += a["confident"] and b["confident"]
            self._keep(self._flipped, conversation)

    def result(self) -> RuleReplay:
        """The finished count."""
        judged = len(self.p_a)
        flips = self.counts["to_violation"] + self.counts["to_allow"]
        return RuleReplay(
            rule=self.rule,
            conversations=self.conversations,
            judged=judged,
            to_violation=CountedShare.of(self.counts["to_violation"], judged),
            to_allow=CountedShare.of(self.counts["to_allow"], judged),
            flips=CountedShare.of(flips, judged),
            confident_flips=self.counts["confident"],
            flagged_a=CountedShare.of(self.counts["flagged_a"], judged),
            flagged_b=CountedShare.of(self.counts["flagged_b"], judged),
            unjudged_a_only=self.counts["unjudged_a_only"],
            unjudged_b_only=self.counts["unjudged_b_only"],
            unjudged_both=self.counts["unjudged_both"],
            reasons=dict(self.reasons.most_common(REASONS)),
            quantiles=self._quantiles(),
            flipped=_largest_first(self._flipped),
            largest=_largest_first(self._largest),
        )

    @property
    def probabilities(self) -> Probabilities:
        """The probabilities of all conversations that both judged."""
        flips = np.frombuffer(bytes(self.is_flip), dtype=np.bool_)
        return Probabilities(np.array(self.p_a), np.array(self.p_b), flips)

    def _add_unjudged(self, a: Row, b: Row) -> None:
        a_unjudged, b_unjudged = a["verdict"] == "unjudged", b["verdict"] == "unjudged"
        if a_unjudged and b_unjudged:
            self.counts["unjudged_both"] += 1
        elif a_unjudged:
            self.counts["unjudged_a_only"] += 1
        else:
            self.counts["unjudged_b_only"] += 1
        self.reasons[a["reason"] or b["reason"]] += 1

    def _quantiles(self) -> dict[str, float] | None:
        if not self.p_a:
            return None
        changes = np.array(self.p_b) - np.array(self.p_a)
        values = np.quantile(changes, QUANTILES).tolist()
        return {f"{level:g}": value for level, value in zip(QUANTILES, values, strict=True)}

    def _keep(
        self,
        largest: list[tuple[float, int, ReplayedConversation]],
        conversation: ReplayedConversation,
    ) -> None:
        """Keep it if it is among the `shown` largest changes; of equal ones the first."""
        entry = (abs(conversation.change), -self.conversations, conversation)
        if len(largest) < self.shown:
            heapq.heappush(largest, entry)
        elif entry[:2] > largest[0][:2]:
            heapq.heapreplace(largest, entry)


def _largest_first(
    largest: Iterable[tuple[float, int, ReplayedConversation]],
) -> tuple[ReplayedConversation, ...]:
    ordered = sorted(largest, key=lambda entry: entry[:2], reverse=True)
    return tuple(conversation for _, _, conversation in ordered)
