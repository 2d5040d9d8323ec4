"""The deployment to plan: `recipes/plans/<name>.yaml`. Values only."""

from __future__ import annotations

from pathlib import Path

from pydantic import ConfigDict, Field, model_validator

from guard.files.yaml_file import Strict, load
from guard.home import HOME, own_or_shipped

PLANS = HOME / "recipes" / "plans"
MOST_CHECKS = 1_000_000


class Finite(Strict):
    """Strict, and no number is infinite or NaN."""

    model_config = ConfigDict(allow_inf_nan=False)


class PlannedTraffic(Finite):
    """The traffic that is drawn. docs/planning.md has the keys.

    `lengths`: quantiles of a whole conversation's tokens at equal steps. A conversation is checked
    `turns` times in the mean, each time after it has grown by an equal part.
    """

    rate: float = Field(default=10.0, gt=0)
    lengths: tuple[int, ...] = Field(default=(87, 289, 740), min_length=2)
    turns: float = Field(default=1.0, ge=1)
    think_s: float = Field(default=20.0, gt=0)
    rules_a_check: tuple[int, int] = (5, 20)
    rules: int = Field(default=100, ge=1)
    zipf: float = Field(default=1.0, ge=0)

    @model_validator(mode="after")
    def _is_possible(self) -> PlannedTraffic:
        least, most = self.rules_a_check
        if not 1 <= least <= most <= self.rules:
            raise ValueError(
                f"rules_a_check: least and most, of the {self.rules} rules (got {least}, {most})"
            )
        if list(self.lengths) != sorted(self.lengths) or self.lengths[0] < 1:
            raise ValueError("lengths: quantiles of at least 1 token, rising")
        return self


class Plan(Finite):
    """One deployment, on machines like this one. docs/planning.md has the keys.

    Memory and slots that are None are those of the model's recipe.
    """

    name: str
    model: str = "tiny"
    traffic: PlannedTraffic = PlannedTraffic()
    p95_ms: float = Field(default=500.0, gt=0)
    most_busy: float = Field(default=0.85, gt=0, lt=1)
    price_an_hour: float | None = Field(default=None, gt=0)
    memory_gib: float | None = Field(default=None, gt=0)
    slots: int | None = Field(default=None, ge=1)
    checks: int = Field(default=2000, ge=50, le=MOST_CHECKS)  # simulated at each rate
    seed: int = Field(default=0, ge=0)


def load_plan(name: str) -> Plan:
    """The plan of this name, or in this file. Raises GuardError for no plan or a bad value."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = own_or_shipped(PLANS / f"{name}.yaml")
    return load(path, Plan)
