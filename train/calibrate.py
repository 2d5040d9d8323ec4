"""From validation logits to a temperature, a threshold and honest intervals. Knows nothing of models or files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.stats import binomtest, bootstrap, rankdata
from sklearn.metrics import f1_score, roc_curve

from guard.errors import GuardError
from guard.verdict import Calibration

TEMPERATURES = (0.05, 50.0)
RESAMPLES = 999


def calibrate(logits: Sequence[float], labels: Sequence[int]) -> Calibration:
    """Temperature and threshold from validation logits (nats) and labels (1 = violates).

    The temperature minimises the negative log-likelihood against Platt's targets, (n1 + 1) / (n1 + 2) and 1 / (n0 + 2)
    instead of 1 and 0: the minimum exists even where validation is separated perfectly (Platt, 1999; Guo et al., 2017).

    The threshold is one of the neutral 0.5 and all midpoints between neighbouring logits: of those whose balanced accuracy is within
    one standard error of the best (Breiman et al., 1984), the nearest to neutral, then the lower one. Balanced, because plain
    accuracy on a rare violation is best served by never finding one; within an error, because validation examples whose
    phrasings occur in training say little about where others will stand.

    Raises GuardError on a logit that is not finite.
    """
    x, y = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    if not np.isfinite(x).all():
        remedy = "The training diverged: lower the learning rate in the recipe"
        raise GuardError("verdict logits are not finite", got=f"{(~np.isfinite(x)).sum()} of {len(x)}", remedy=remedy)
    calibration = Calibration(temperature=_temperature(x, y))
    return Calibration(calibration.temperature, calibration.p_violation(_cut(x, y)))


def validation_metrics(logits: Sequence[float], labels: Sequence[int], calibration: Calibration) -> dict[str, Any]:
    """Metrics of calibrated verdicts, with 95 % intervals (Wilson; percentile bootstrap within the classes for the AUROC).

    On the split that chose the threshold they flatter a little: the figures to quote are the test split's, from `make eval`.
    """
    p = np.array([calibration.p_violation(logit) for logit in logits])
    y = np.asarray(labels)
    violates = p >= calibration.threshold
    correct = binomtest(int((violates == y).sum()), len(y)).proportion_ci(method="wilson")
    x = np.asarray(logits, dtype=np.float64)
    auroc = bootstrap((x[y == 1], x[y == 0]), _auroc, n_resamples=RESAMPLES, method="percentile", rng=0)
    return {
        "n": len(y),
        "accuracy": round(float((violates == y).mean()), 4),
        "accuracy_ci95": [round(correct.low, 4), round(correct.high, 4)],
        "balanced_accuracy": round(_balanced_accuracy(violates, y), 4),
        "f1": round(float(f1_score(y, violates)), 4),
        "auroc": round(float(_auroc(x[y == 1], x[y == 0])), 4),
        "auroc_ci95": [round(float(auroc.confidence_interval.low), 4), round(float(auroc.confidence_interval.high), 4)],
        "nll": round(float(-np.log(np.where(y == 1, p, 1 - p).clip(1e-12)).mean()), 4),
    }


def _temperature(x: np.ndarray, y: np.ndarray) -> float:
    n1 = int(y.sum())
    n0 = len(y) - n1
    targets = np.where(y == 1, (n1 + 1) / (n1 + 2), 1 / (n0 + 2))

    def nll(log_temperature: float) -> float:
        scaled = x / np.exp(log_temperature)
        return float((np.logaddexp(0, scaled) - targets * scaled).mean())

    low, high = np.log(TEMPERATURES)
    return float(np.exp(minimize_scalar(nll, bounds=(low, high), method="bounded").x))


def _cut(x: np.ndarray, y: np.ndarray) -> float:
    """The logit at and above which a conversation violates."""
    false_positives, true_positives, lowest_flagged = roc_curve(y, x, drop_intermediate=False)
    cuts = np.append((lowest_flagged[1:-1] + lowest_flagged[2:]) / 2, 0.0)  # without "never" and "always"
    rates = np.array([np.append(rate[1:-1], (x[y == label] >= 0).mean()) for label, rate in ((1, true_positives), (0, false_positives))])
    gain = (1 + rates[0] - rates[1]) / 2
    counts = np.array([[(y == 1).sum()], [(y == 0).sum()]])
    plausible = (rates * counts + 1) / (counts + 2)  # of n rows all judged right, the next may be wrong: no error of zero
    errors = np.sqrt((plausible * (1 - plausible) / counts).sum(0)) / 2
    best = cuts[gain >= gain.max() - errors[gain.argmax()] - 1e-12]
    return float(best[np.lexsort((best, np.abs(best)))[0]])


def _balanced_accuracy(violates: np.ndarray, y: np.ndarray) -> float:
    return float((violates[y == 1].mean() + (~violates[y == 0]).mean()) / 2)


def _auroc(violating: np.ndarray, allowed: np.ndarray, axis: int = -1) -> Any:
    """Mann and Whitney's U as a share: how often a violating conversation has the higher logit, ties counted half."""
    n = violating.shape[axis]
    ranks = rankdata(np.concatenate([violating, allowed], axis=axis), axis=axis)
    rank_sum = np.take(ranks, range(n), axis=axis).sum(axis=axis)
    return (rank_sum - n * (n + 1) / 2) / (n * allowed.shape[axis])
