"""What a step takes here, as `make bench NAME=calibrate` measured it: `runs/calibration.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from guard.errors import GuardError, choose_from
from guard.files.strict_json import load_json
from guard.files.yaml_file import Strict, validate
from serve.plan.batching import StepWork

COMMAND = "make bench NAME=calibrate"
FEATURES = ("steps", "tokens", "pairs", "sequences")  # of StepWork, each with a coefficient
FIT_ROUNDS = 5
SUBMIT_FEATURES = ("checks", "conversation_tokens", "rules")


class BurstRow(Strict):
    """Checks that were submitted at once: the time they took, and the work of their steps.

    `steps`: the steps that ran; `work["steps"]` is the planner's own count.
    """

    method: str
    checks: int
    conversation_tokens: int
    rules: int
    submit_ms: float
    steps_ms: float
    steps: int
    work: dict[str, float]


class FittedCost(Strict):
    """The times of one method, linear in what its steps compute.

    `swap_in_ms`: for an adapter. `wake_ms`: the extra time of a check that finds the
    engine asleep. `error`: the median relative error of the fit on its own bursts.
    """

    step: dict[str, float]
    submit: dict[str, float]
    swap_in_ms: float = 0.0
    wake_ms: float = 0.0
    error: float = 0.0

    def step_ms(self, work: StepWork) -> float:
        computed = sum(self.step[name] * float(getattr(work, name)) for name in FEATURES)
        return computed + work.swap_ins * self.swap_in_ms

    def submit_ms(self, tokens: int, rules: int) -> float:
        check_ms, token_ms, rule_ms = (self.submit[name] for name in SUBMIT_FEATURES)
        return check_ms + token_ms * tokens + rule_ms * rules

    @property
    def shown_ms(self) -> dict[str, float]:
        """The times of the pieces of a step that tables show."""
        return {
            "step": self.step["steps"],
            "1,000 tokens": self.step["tokens"] * 1000,
            "M pairs": self.step["pairs"] * 1e6,
            "a rule": self.step["sequences"],
            "swap-in": self.swap_in_ms,
            "wake": self.wake_ms,
        }


class DeviceCalibration(Strict):
    """Everything in `runs/calibration.json`. `suffix_tokens`: what a rule adds.

    `scaffold_tokens`: the length of the whole blocks that every conversation's prompt begins with.
    """

    commit: str
    hardware: str
    versions: dict[str, str]
    model: str
    peak_memory_mib: float
    scaffold_tokens: int
    suffix_tokens: int
    methods: dict[str, FittedCost]
    bursts: tuple[BurstRow, ...]

    def cost(self, method: str) -> FittedCost:
        """The coefficients of a method. Raises GuardError where it was not measured."""
        if method not in self.methods:
            remedy = choose_from(method, self.methods)
            raise GuardError("the calibration has no such method", got=method, remedy=remedy)
        return self.methods[method]


def load_calibration(path: Path) -> DeviceCalibration:
    """Read the file. Raises GuardError where there is none, or it has another version."""
    remedy = f"Run `{COMMAND}`"
    if not path.is_file():
        raise GuardError("this machine was not calibrated", where=path, remedy=remedy)
    content = load_json(path, remedy=remedy)
    return validate(content, DeviceCalibration, where=path, remedy=remedy)


def fitted(rows: Sequence[BurstRow]) -> FittedCost:
    """The coefficients with the smallest relative errors on one method's bursts, none below 0."""
    step_rows = [[row.work[name] for name in FEATURES] for row in rows]
    submit_rows = [[float(getattr(row, name)) for name in SUBMIT_FEATURES] for row in rows]
    steps_ms = [row.steps_ms for row in rows]
    step = non_negative(step_rows, steps_ms)
    submit = non_negative(submit_rows, [row.submit_ms for row in rows])
    predicted = np.asarray(step_rows) @ step
    return FittedCost(
        step=dict(zip(FEATURES, step.tolist(), strict=True)),
        submit=dict(zip(SUBMIT_FEATURES, submit.tolist(), strict=True)),
        error=float(np.median(np.abs(predicted / np.asarray(steps_ms) - 1))),
    )


def non_negative(
    features: Sequence[Sequence[float]] | np.ndarray, measured: Sequence[float]
) -> np.ndarray:
    """A coefficient for each column, none below 0: least squares of relative errors.

    Errors are relative to the prediction of the round before. If they were relative to the measured
    times, a burst would count the less the slower the machine happened to be, and all coefficients
    would come out low. Columns are scaled, so that small features count too.
    """
    counts, times = np.asarray(features, dtype=float), np.asarray(measured, dtype=float)
    predicted = times
    for _ in range(FIT_ROUNDS):
        scaled = counts / predicted[:, None]
        scale = np.maximum(scaled.max(axis=0), 1e-12)
        solution, _ = nnls(scaled / scale, times / predicted)
        coefficients = np.asarray(solution / scale)
        predicted = np.maximum(counts @ coefficients, 1e-12)
    return coefficients
