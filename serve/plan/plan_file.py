"""The deployment to plan: `recipes/plans/<name>.yaml`. Values only."""

from __future__ import annotations

import math
from pathlib import Path

from pydantic import ConfigDict, Field, model_validator

from guard.files.yaml_file import Strict, load
from guard.home import HOME, own_or_shipped

PLANS = HOME / "recipes" / "plans"
FINITE = ConfigDict(allow_inf_nan=False)


class PlannedTraffic(Strict):
    """The traffic of all groups. docs/planning.md has the keys."""

    model_config = FINITE
    rate: float = Field(default=10.0, gt=0)
    lengths: tuple[int, ...] = Field(default=(87, 289, 740), min_length=2)
    turns: float = Field(default=1.0, ge=1)
    think_s: float = Field(default=20.0, gt=0)
    rules_a_check: tuple[int, int] = (5, 20)
    rules: int = Field(default=100, ge=1)
    groups: int = Field(default=1, ge=1)
    zipf: float = Field(default=1.0, ge=0)

    @property
    def mean_rules(self) -> float:
        return sum(self.rules_a_check) / 2

    @property
    def of_group(self) -> PlannedTraffic:
        """The traffic of one group of the rules."""
        rules = math.ceil(self.rules / self.groups)
        return self.model_copy(update={"rate": self.rate / self.groups, "rules": rules})

    @model_validator(mode="after")
    def _is_possible(self) -> PlannedTraffic:
        least, most = self.rules_a_check
        rules = self.rules // self.groups
        if not 1 <= least <= most <= rules:
            limits = f"least and most, of the {rules} rules of a group (got {least}, {most})"
            raise ValueError(f"rules_a_check: {limits}")
        if list(self.lengths) != sorted(self.lengths) or self.lengths[0] < 1:
            raise ValueError("lengths: quantiles of at least 1 token, rising")
        return self


class Plan(Strict):
    """One deployment, on machines like this one, or like that of the `calibration`, a file of the
    checkout or of HOME. None is what the model's recipe says.
    """

    model_config = FINITE
    name: str
    model: str = "tiny"
    calibration: str | None = None
    traffic: PlannedTraffic = PlannedTraffic()
    p95_ms: float = Field(default=500.0, gt=0)
    p99_ms: float | None = Field(default=None, gt=0)
    most_busy: float = Field(default=0.85, gt=0, lt=1)
    price_an_hour: float = Field(gt=0)
    judge_price: float | None = Field(default=None, gt=0)
    memory_gib: float | None = Field(default=None, gt=0)
    slots: int | None = Field(default=None, ge=1)

    @property
    def of_group(self) -> Plan:
        return self.model_copy(update={"traffic": self.traffic.of_group})


def load_plan(name: str) -> Plan:
    """The plan of this name, or in this file. Raises GuardError for no plan or a bad value."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = own_or_shipped(PLANS / f"{name}.yaml")
    return load(path, Plan)
