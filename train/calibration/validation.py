"""How good verdicts are on the validation split, with intervals that take rows as independent. Rows
come in groups that share a context: of such the intervals are too narrow. Those of the test split
draw groups (`eval/metrics.py`). Knows nothing of models or files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import log_expit
from scipy.stats import binomtest, bootstrap, rankdata, t

from guard.calibrate import fit_platt, left_out_probabilities
from guard.twins import FEWEST_TWINS, TwinRate
from guard.verdict import Calibration, expected_calibration_error
from guard.weights.card import TWINS

RELIABILITY_BINS = 10
RESAMPLES = 999
MOST_RESAMPLED = 4_000_000  # rows that are drawn at once: some 200 MB


def validation_metrics(
    logits: Sequence[float], labels: Sequence[int], calibration: Calibration
) -> dict[str, Any]:
    """Metrics of calibrated verdicts, with 95 % intervals of independent rows. Wilson's for shares,
    percentile bootstrap within the classes for the AUROC. On the split that chose the threshold
    they flatter a little: the figures to quote are the test split's, from `make eval`. ECE and
    reliability are of probabilities that each row got from the other folds.
    """
    x = np.asarray(logits, dtype=np.float64)
    y = np.asarray(labels)
    p = np.array([calibration.p_violation(logit) for logit in logits])
    confident = np.array([calibration.verdict("", logit).confident for logit in logits])
    violates = p >= calibration.threshold
    left_out = left_out_probabilities(x, y, with_bias=bool(calibration.bias))
    return {
        "n": len(y),
        **_shares("accuracy", violates == y),
        **_shares("false_positive_rate", violates[y == 0]),
        **_shares("recall", violates[y == 1]),
        "confident": round(float(confident.mean()), 4),
        "accuracy_where_confident": _mean((violates == y)[confident]),
        **_auroc_with_interval(x[y == 1], x[y == 0]),
        "ece": round(expected_calibration_error(y.tolist(), left_out.tolist()) or 0.0, 4),
        "reliability": _reliability(left_out, y),
    }


def twin_metrics(twins: Sequence[float], calibration: Calibration) -> dict[str, Any]:
    """Of twins with these logits: how many are flagged, as it stands in a card."""
    rate = TwinRate(n=len(twins))
    if rate.n >= FEWEST_TWINS:
        flagged = np.array([calibration.verdict("", logit).violates for logit in twins])
        low, high = _wilson(flagged)
        rate = TwinRate(n=rate.n, fpr=_mean(flagged), fpr_ci95=(low, high))
    return {TWINS: rate.model_dump(mode="json")}


def validation_loss(
    logits: Sequence[float] | np.ndarray, labels: Sequence[int] | np.ndarray
) -> float:
    """Mean negative log-likelihood in nats of labels (1 = violates) under verdict logits."""
    x = np.asarray(logits, dtype=np.float64)
    y = np.asarray(labels)
    return float(np.logaddexp(0.0, np.where(y == 1, -x, x)).mean())


def calibrated_loss(logits: Sequence[float], labels: Sequence[int]) -> float:
    """The loss after Platt scaling on the same rows; infinite where a logit is not finite."""
    x = np.asarray(logits, dtype=np.float64)
    if not np.isfinite(x).all():
        return math.inf
    y = np.asarray(labels)
    temperature, bias = fit_platt(x, y)
    return validation_loss(x / temperature + bias, y)


def since_day_zero(
    logits: Sequence[float], reader_logits: Sequence[float], labels: Sequence[int], validated: int
) -> dict[str, Any]:
    """What training brought a rule, of which the reader judged before. AUROC of both on the test
    rows, which are behind as many as were `validated`; on these by how many nats the calibrated
    loss is above the reader's, in pairs.
    """
    y = np.asarray(labels)
    aurocs: dict[str, Any] = {}
    losses: list[np.ndarray] = []
    for name, values in (("reader", reader_logits), ("trained", logits)):
        x, tested = np.split(np.asarray(values, dtype=np.float64), [validated])
        violates = y[validated:] == 1
        aurocs[name] = _auroc_with_interval(tested[violates], tested[~violates])
        temperature, bias = fit_platt(x, y[:validated])
        losses.append(-log_expit((2 * y[:validated] - 1) * (x / temperature + bias)))
    above = losses[1] - losses[0]
    mean, error = float(above.mean()), float(above.std(ddof=1)) / math.sqrt(validated)
    half_width = float(t.ppf(0.975, validated - 1)) * error
    interval = [round(mean - half_width, 4), round(mean + half_width, 4)]
    return {"test": aurocs, "loss_above_reader": round(mean, 4), "loss_above_reader_ci95": interval}


def compared_with_parents(
    answers: Mapping[str, tuple[Sequence[float], Calibration]], labels: Sequence[int]
) -> dict[str, Any]:
    """Accuracy and AUROC of a composed adapter, the first, and each parent on the same rows, from
    logits in nats; and interference: the share of rows with a verdict that no parent gives, and
    how many of these are wrong.
    """
    y = np.asarray(labels)
    measured: dict[str, Any] = {}
    decisions: list[np.ndarray] = []
    for name, (logits, calibration) in answers.items():
        x = np.asarray(logits, dtype=np.float64)
        violates = np.array([calibration.verdict("", logit).violates for logit in logits])
        decisions.append(violates)
        auroc = _auroc_with_interval(x[y == 1], x[y == 0])
        measured[name] = _shares("accuracy", violates == y) | auroc
    own = decisions[0]
    alone = (np.array(decisions[1:]) != own).all(axis=0)
    wrong = int((alone & (own != y)).sum())
    shares = _shares("interference", alone)
    return {"n": len(y), "adapters": measured, **shares, "interference_wrong": wrong}


def _reliability(p: np.ndarray, y: np.ndarray) -> list[dict[str, Any]]:
    """Bins of equally many rows by probability. Each has its mean p, the share that violates with
    its 95 % interval, and its number of rows.
    """
    bins: list[dict[str, Any]] = []
    for rows in np.array_split(np.argsort(p, kind="stable"), min(RELIABILITY_BINS, len(p))):
        mean_p, violating = round(float(p[rows].mean()), 4), y[rows] == 1
        share, interval = _mean(violating), _wilson(violating)
        bins.append({"p": mean_p, "violates": share, "ci95": interval, "n": len(rows)})
    return bins


def _shares(name: str, hits: np.ndarray) -> dict[str, Any]:
    return {name: round(float(hits.mean()), 4), f"{name}_ci95": _wilson(hits)}


def _mean(hits: np.ndarray) -> float | None:
    if len(hits) == 0:
        return None
    return round(float(hits.mean()), 4)


def _wilson(hits: np.ndarray) -> list[float]:
    interval = binomtest(int(hits.sum()), len(hits)).proportion_ci(method="wilson")
    return [round(float(interval.low), 4), round(float(interval.high), 4)]


def _auroc_with_interval(violating: np.ndarray, allowed: np.ndarray) -> dict[str, Any]:
    rows = len(violating) + len(allowed)
    resampled = bootstrap(
        (violating, allowed),
        _auroc,
        n_resamples=RESAMPLES,
        batch=max(1, min(RESAMPLES, MOST_RESAMPLED // rows)),
        method="percentile",
        rng=0,
    )
    low, high = resampled.confidence_interval.low, resampled.confidence_interval.high
    return {
        "auroc": round(float(_auroc(violating, allowed)), 4),
        "auroc_ci95": [round(float(low), 4), round(float(high), 4)],
    }


def _auroc(violating: np.ndarray, allowed: np.ndarray, axis: int = -1) -> Any:
    """Mann and Whitney's U as a share. How often a violating conversation has the higher logit,
    ties counted half.
    """
    n = violating.shape[axis]
    ranks = rankdata(np.concatenate([violating, allowed], axis=axis), axis=axis)
    rank_sum = np.take(ranks, range(n), axis=axis).sum(axis=axis)
    return (rank_sum - n * (n + 1) / 2) / (n * allowed.shape[axis])
