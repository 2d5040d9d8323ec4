"""From validation logits to a probability, a threshold, a band of doubt and honest intervals. Knows nothing of models or files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize, minimize_scalar
from scipy.stats import binomtest, bootstrap, rankdata
from sklearn.metrics import f1_score, roc_curve

from guard.errors import GuardError
from guard.verdict import Calibration, expected_calibration_error

TEMPERATURES = (0.05, 50.0)
BIASES = (-10.0, 10.0)
FOLDS = 10  # that temperature and Platt scaling are compared on
SURE_ERROR = (
    0.05  # of the verdicts outside the band of doubt that may be wrong on the validation split
)
RELIABILITY_BINS = 10
RESAMPLES = 999

Fit = Callable[[np.ndarray, np.ndarray], tuple[float, float]]  # logits, labels -> temperature, bias


def calibrate(
    logits: Sequence[float], labels: Sequence[int], max_fpr: float | None = None
) -> Calibration:
    """Probability, threshold and band of doubt from validation logits (nats) and labels (1 = violates).

    Temperature scaling or Platt's with a bias, whichever has the lower negative log-likelihood over FOLDS folds left out in turn. Either
    is fitted to Platt's targets, (n1 + 1) / (n1 + 2) and 1 / (n0 + 2) instead of 1 and 0: the minimum exists even where validation is
    separated perfectly (Platt, 1999; Guo et al., 2017).

    The threshold is one of the neutral 0.5 and all midpoints between neighbouring logits: of those whose balanced accuracy is within
    one standard error of the best (Breiman et al., 1984), the nearest to neutral, then the lower one. Balanced, because plain
    accuracy on a rare violation is best served by never finding one; within an error, because validation examples whose
    phrasings occur in training say little about where others will stand. With `max_fpr` it is the lowest midpoint whose share of
    allowed conversations at or above it is no larger.

    The band of doubt is the narrowest about the threshold, in nats, outside of which at most SURE_ERROR of the verdicts are wrong.

    Raises GuardError on a logit that is not finite.
    """
    x, y = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    if not np.isfinite(x).all():
        remedy = "The training diverged: lower the learning rate in the recipe"
        raise GuardError(
            "verdict logits are not finite",
            got=f"{(~np.isfinite(x)).sum()} of {len(x)}",
            remedy=remedy,
        )
    temperature, bias = min((_temperature, _platt), key=lambda fit: _left_out_nll(fit, x, y))(x, y)
    probability = Calibration(temperature, bias=bias)
    neutral = -bias * temperature  # where p = 0.5
    cut = neutral + _cut(x - neutral, y) if max_fpr is None else _cut_at(x, y, max_fpr)
    doubt = _doubt(x, y, cut)
    uncertainty_band = (probability.p_violation(cut - doubt), probability.p_violation(cut + doubt))
    return Calibration(temperature, probability.p_violation(cut), bias, uncertainty_band)


def validation_metrics(
    logits: Sequence[float], labels: Sequence[int], calibration: Calibration
) -> dict[str, Any]:
    """Metrics of calibrated verdicts, with 95 % intervals (Wilson; percentile bootstrap within the classes for the AUROC).

    On the split that chose the threshold they flatter a little: the figures to quote are the test split's, from `make eval`. ECE and
    reliability are of probabilities that each row got from the other folds.
    """
    p = np.array([calibration.p_violation(logit) for logit in logits])
    y = np.asarray(labels)
    violates = p >= calibration.threshold
    sure = np.array([calibration.verdict("", logit).confident for logit in logits])
    x = np.asarray(logits, dtype=np.float64)
    left_out = _left_out_p(_platt if calibration.bias else _temperature, x, y)
    auroc = bootstrap(
        (x[y == 1], x[y == 0]), _auroc, n_resamples=RESAMPLES, method="percentile", rng=0
    )
    return {
        "n": len(y),
        "accuracy": round(float((violates == y).mean()), 4),
        "accuracy_ci95": _interval(violates == y),
        "false_positive_rate": round(float(violates[y == 0].mean()), 4),
        "false_positive_rate_ci95": _interval(violates[y == 0]),
        "recall": round(float(violates[y == 1].mean()), 4),
        "recall_ci95": _interval(violates[y == 1]),
        "confident": round(float(sure.mean()), 4),
        "accuracy_where_confident": round(float((violates == y)[sure].mean()), 4)
        if sure.any()
        else None,
        "balanced_accuracy": round(_balanced_accuracy(violates, y), 4),
        "f1": round(float(f1_score(y, violates)), 4),
        "auroc": round(float(_auroc(x[y == 1], x[y == 0])), 4),
        "auroc_ci95": [
            round(float(auroc.confidence_interval.low), 4),
            round(float(auroc.confidence_interval.high), 4),
        ],
        "nll": round(float(-np.log(np.where(y == 1, p, 1 - p).clip(1e-12)).mean()), 4),
        "ece": round(expected_calibration_error(y.tolist(), left_out.tolist()) or 0.0, 4),
        "reliability": reliability(left_out, y),
    }


def reliability(p: np.ndarray, y: np.ndarray, bins: int = RELIABILITY_BINS) -> list[dict[str, Any]]:
    """Bins of equally many rows by probability: mean p, the share that violates with its 95 % interval, rows."""
    found = []
    for rows in np.array_split(np.argsort(p, kind="stable"), min(bins, len(p))):
        violating = y[rows] == 1
        found.append(
            {
                "p": round(float(p[rows].mean()), 4),
                "violates": round(float(violating.mean()), 4),
                "ci95": _interval(violating),
                "n": len(rows),
            }
        )
    return found


def _interval(hits: np.ndarray) -> list[float]:
    """Wilson's 95 % interval of a share."""
    interval = binomtest(int(hits.sum()), len(hits)).proportion_ci(method="wilson")
    return [round(float(interval.low), 4), round(float(interval.high), 4)]


def _targets(y: np.ndarray) -> np.ndarray:
    n1 = int(y.sum())
    return np.where(y == 1, (n1 + 1) / (n1 + 2), 1 / (len(y) - n1 + 2))


def _nll(x: np.ndarray, targets: np.ndarray, temperature: float, bias: float) -> float:
    scaled = x / temperature + bias
    return float((np.logaddexp(0, scaled) - targets * scaled).mean())


def _temperature(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    targets = _targets(y)
    low, high = np.log(TEMPERATURES)
    found = minimize_scalar(
        lambda log_t: _nll(x, targets, np.exp(log_t), 0.0), bounds=(low, high), method="bounded"
    )
    return float(np.exp(found.x)), 0.0


def _platt(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    targets = _targets(y)
    start = (np.log(_temperature(x, y)[0]), 0.0)
    bounds = (tuple(np.log(TEMPERATURES)), BIASES)
    found = minimize(
        lambda fitted: _nll(x, targets, np.exp(fitted[0]), fitted[1]),
        start,
        bounds=bounds,
        method="L-BFGS-B",
    )
    return float(np.exp(found.x[0])), float(found.x[1])


def _folds(y: np.ndarray) -> list[np.ndarray]:
    """Which rows are left out in turn, each time with their share of both labels; both labels are among the others."""
    fold = np.empty(len(y), dtype=int)
    for label in (0, 1):
        fold[y == label] = np.arange((y == label).sum()) % FOLDS
    return [
        out
        for out in (fold == number for number in range(FOLDS))
        if out.any() and len(set(y[~out])) == 2
    ]


def _left_out_nll(fit: Fit, x: np.ndarray, y: np.ndarray) -> float:
    """The log-likelihood lost on rows that were not fitted, summed over the folds."""
    return float(sum(_nll(x[out], y[out], *fit(x[~out], y[~out])) * out.sum() for out in _folds(y)))


def _left_out_p(fit: Fit, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The probability of every row as fitted on the other folds; on all rows where there are too few for folds."""
    p = np.empty(len(x))
    for out in (np.full(len(y), True), *_folds(y)):
        temperature, bias = fit(x[~out], y[~out]) if not out.all() else fit(x, y)
        p[out] = [Calibration(temperature, bias=bias).p_violation(logit) for logit in x[out]]
    return p


def _cut_at(x: np.ndarray, y: np.ndarray, max_fpr: float) -> float:
    """The lowest logit at and above which at most `max_fpr` of the allowed rows stand."""
    allowed = np.sort(x[y == 0])[::-1]
    if max_fpr * len(allowed) < 1:
        what, remedy = (
            "too few allowed validation rows for the rule's max_fpr",
            f"Raise it, or have at least {np.ceil(1 / max_fpr):.0f}",
        )
        raise GuardError(what, got=f"{len(allowed)} rows, max_fpr {max_fpr:g}", remedy=remedy)
    first_kept = allowed[int(np.floor(max_fpr * len(allowed)))]
    above = x[x > first_kept]
    return float((first_kept + above.min()) / 2) if len(above) else float(first_kept + 1.0)


def _doubt(x: np.ndarray, y: np.ndarray, cut: float) -> float:
    """Half the width of the band of doubt in nats; infinite where no band leaves enough verdicts that are right."""
    distance = np.abs(x - cut)
    wrong = ((x >= cut) != (y == 1))[np.argsort(-distance, kind="stable")]
    farthest = np.sort(distance)[::-1]
    outside = np.arange(1, len(x) + 1)
    # One more wrong in two more rows: a handful of verdicts that are all right is no proof.
    ends_a_tie = np.append(
        farthest[:-1] != farthest[1:], True
    )  # equal distances are all inside or all outside
    enough = np.flatnonzero(((np.cumsum(wrong) + 1) / (outside + 2) <= SURE_ERROR) & ends_a_tie)
    if len(enough) == 0:
        return float("inf")
    last = int(enough[-1])
    return 0.0 if last == len(x) - 1 else float((farthest[last] + farthest[last + 1]) / 2)


def _cut(x: np.ndarray, y: np.ndarray) -> float:
    """The logit at and above which a conversation violates."""
    false_positives, true_positives, lowest_flagged = roc_curve(y, x, drop_intermediate=False)
    cuts = np.append(
        (lowest_flagged[1:-1] + lowest_flagged[2:]) / 2, 0.0
    )  # without "never" and "always"
    rates = np.array(
        [
            np.append(rate[1:-1], (x[y == label] >= 0).mean())
            for label, rate in ((1, true_positives), (0, false_positives))
        ]
    )
    gain = (1 + rates[0] - rates[1]) / 2
    counts = np.array([[(y == 1).sum()], [(y == 0).sum()]])
    plausible = (rates * counts + 1) / (
        counts + 2
    )  # of n rows all judged right, the next may be wrong: no error of zero
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
