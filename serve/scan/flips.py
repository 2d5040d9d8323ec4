"""What two versions say of the same conversations, in numbers: from the rows of a scan by both.

Knows nothing of engines, texts or pages.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from scipy.stats import binomtest

QUANTILES = {"least": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "most": 1.0}
REASONS = 5  # of the unjudged, the commonest
SHARES = {
    "flagged_a": "flagged by A",
    "flagged_b": "flagged by B",
    "flips": "verdicts that flip",
    "to_violation": "allow -> violation",
    "to_allow": "violation -> allow",
}
UNJUDGED = {
    "unjudged_a": "unjudged by A only",
    "unjudged_b": "unjudged by B only",
    "unjudged_a_and_b": "unjudged by both",
}
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

    def __str__(self) -> str:
        share = 100 * self.count / max(1, self.total)
        low, high = (100 * end for end in self.ci95)
        return f"{self.count:,} ({share:.2f} %, 95 % interval {low:.2f} to {high:.2f})"


@dataclass(frozen=True)
class Flip:
    """The place of a conversation on which both versions disagree, and what either says of it."""

    source: str
    row: int
    id: str
    verdict_a: str
    verdict_b: str
    p_a: float
    p_b: float

    @property
    def change(self) -> float:
        return self.p_b - self.p_a


@dataclass
class ReplayTally:
    """Counts one rule's rows, conversation by conversation, and keeps the `shown` largest flips."""

    shown: int
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    changes: array[float] = field(default_factory=lambda: array("d"))
    flips: list[Flip] = field(default_factory=list)

    def add(self, a: Row, b: Row) -> None:
        """Count one more conversation's rows."""
        unjudged = [side for side, row in (("a", a), ("b", b)) if row["verdict"] == "unjudged"]
        if unjudged:
            self.counts["unjudged_" + "_and_".join(unjudged)] += 1
            self.reasons[a["reason"] or b["reason"]] += 1
            return
        self.changes.append(b["p_violation"] - a["p_violation"])
        self.counts["flagged_a"] += a["verdict"] == "violation"
        self.counts["flagged_b"] += b["verdict"] == "violation"
        verdicts = (a["verdict"], b["verdict"])
        if verdicts not in FLIPS:
            return
        self.counts["flips"] += 1
        self.counts[FLIPS[verdicts]] += 1
        self.counts["confident_flips"] += a["confident"] and b["confident"]
        stored = (a["source"], a["row"], a["id"])
        self.flips.append(Flip(*stored, *verdicts, a["p_violation"], b["p_violation"]))
        if len(self.flips) > 2 * self.shown:
            self.flips = self.largest()

    def largest(self) -> list[Flip]:
        """The `shown` flips of the largest change, largest first; of equal ones the first."""
        return heapq.nlargest(self.shown, self.flips, key=lambda flip: abs(flip.change))

    def share(self, name: str) -> CountedShare:
        return CountedShare.of(self.counts[name], len(self.changes))

    def quantiles(self) -> dict[str, float]:
        """Of B's probability minus A's; empty where none is judged."""
        if not self.changes:
            return {}
        values = np.quantile(np.array(self.changes), list(QUANTILES.values())).tolist()
        return dict(zip(QUANTILES, values, strict=True))

    def facts(self) -> dict[str, Any]:
        """All figures, for a program. In a confident flip both verdicts are confident."""
        return {
            "judged": len(self.changes),
            **{name: asdict(self.share(name)) for name in SHARES},
            "confident_flips": self.counts["confident_flips"],
            **{name: self.counts[name] for name in UNJUDGED},
            "reasons": dict(self.reasons.most_common(REASONS)),
            "quantiles": self.quantiles(),
            "flipped": [asdict(flip) for flip in self.largest()],
        }

    def as_text(self) -> dict[str, str]:
        """The figures for a person, by their labels."""
        rows = {"judged by both": f"{len(self.changes):,}"}
        rows |= {label: f"{self.counts[name]:,}" for name, label in UNJUDGED.items()}
        rows |= {label: str(self.share(name)) for name, label in SHARES.items()}
        rows["both confident"] = f"{self.counts['confident_flips']:,} of the flips"
        if self.changes:
            changes = [f"{label} {change:+.3f}" for label, change in self.quantiles().items()]
            rows["p(B) - p(A)"] = ", ".join(changes)
        for reason, count in self.reasons.most_common(REASONS):
            rows[f"unjudged: {reason}"] = f"{count:,}"
        return rows
