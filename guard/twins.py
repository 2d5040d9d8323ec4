"""How often twins are flagged: harmless conversations that look like a violation."""

from __future__ import annotations

from collections.abc import Sequence

from guard.calibration_rows import LabelledRow
from guard.files.yaml_file import Strict

FEWEST_TWINS = 10  # of fewer no rate is told


class TwinRate(Strict):
    """How many twins there are, and the share that is flagged with its 95 % interval, of enough."""

    n: int
    fpr: float | None = None
    fpr_ci95: tuple[float, float] | None = None

    def is_within(self, largest: float) -> bool:
        """Whether the share may be as small as that, by its interval; of too few it may."""
        return self.fpr_ci95 is None or self.fpr_ci95[0] <= largest

    def __str__(self) -> str:
        if self.fpr is None or self.fpr_ci95 is None:
            return f"too few ({self.n})"
        low, high = self.fpr_ci95
        return f"{self.fpr:.3f} [{low:.3f}, {high:.3f}]"


def of_twins(logits: Sequence[float], rows: Sequence[LabelledRow]) -> list[float]:
    return [logit for logit, row in zip(logits, rows, strict=True) if row.is_twin]
