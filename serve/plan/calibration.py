"""What a step takes here, as `make bench NAME=calibrate` measured it: `runs/calibration.json`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from guard.errors import GuardError
from guard.files.strict_json import load_json
from guard.files.yaml_file import Strict, validate

COMMAND = "make bench NAME=calibrate"
Figures = NDArray[np.float64]


def check_work(
    tokens: Figures, cached: Figures, rules: Figures, suffix: int, *, shares: bool
) -> tuple[Figures, Figures]:
    """What checks compute: tokens, and pairs of a token and one that it attends to."""
    whole = tokens + suffix
    if not shares:
        return rules * (whole - cached), rules * (whole**2 - cached**2) / 2
    pairs = (tokens**2 - cached**2) / 2 + rules * (whole**2 - tokens**2) / 2
    return tokens - cached + rules * suffix, pairs


class FittedCost(Strict):
    """The times of one method, linear in what it computes; `wake_ms`: of an engine asleep."""

    step: dict[str, float]
    submit: dict[str, float]
    swap_in_ms: float = 0.0
    wake_ms: float = 0.0
    error: float = 0.0  # the median relative one of the fit


class DeviceCalibration(Strict):
    """What a plan reads of it. `scaffold_tokens`: whole blocks that every prompt begins with.
    `computed`: from what the coefficients were computed, where no calibration has measured them.
    """

    model_config = ConfigDict(extra="ignore")

    commit: str
    hardware: str
    model: str
    scaffold_tokens: int
    suffix_tokens: int
    methods: dict[str, FittedCost]
    computed: str = ""

    @property
    def source(self) -> str:
        """What a table says of its coefficients."""
        if self.computed:
            return f"coefficients that were COMPUTED {self.computed}"
        return f"the calibration of commit {self.commit}"


def load_calibration(path: Path) -> DeviceCalibration:
    """Read the file. Raises GuardError where there is none, or it has another version."""
    remedy = f"Run `{COMMAND}`"
    if not path.is_file():
        raise GuardError("this machine was not calibrated", where=path, remedy=remedy)
    return validate(load_json(path, remedy=remedy), DeviceCalibration, where=path, remedy=remedy)
