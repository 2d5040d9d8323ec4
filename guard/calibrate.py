"""From validation logits to a probability, a threshold and an uncertainty band."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import minimize, minimize_scalar
from sklearn.metrics import roc_curve

from guard.calibration_rows import check_rows_for_rate
from guard.errors import GuardError
from guard.verdict import Calibration

TEMPERATURES = (0.05, 50.0)
BIASES = (-10.0, 10.0)
FOLDS = 10  # on which temperature and Platt scaling are compared
# The share of verdicts outside the uncertainty band that may be wrong on the validation split.
CONFIDENT_ERROR = 0.05

Fit = Callable[[np.ndarray, np.ndarray], tuple[float, float]]  # logits, labels -> temperature, bias


def calibrate(
    logits: Sequence[float],
    labels: Sequence[int],
    max_fpr: float | None = None,
    threshold: float | None = None,
    twins: Sequence[float] = (),
    max_fpr_twins: float | None = None,
) -> Calibration:
    """Calibration from validation logits (nats) and labels (1 = violates).

    Temperature scaling (Guo et al., 2017) or Platt's with a bias, whichever has the lower negative
    log-likelihood over FOLDS folds left out in turn. Either is fitted to Platt's targets (1999), so
    the minimum exists even where validation is separated perfectly.

    The threshold is one of the neutral 0.5 and all midpoints between neighbouring logits: of those
    whose balanced accuracy is within one standard error of the best (Breiman et al., 1984), the
    nearest to neutral, then the lower one. Balanced, because plain accuracy on a rare violation is
    best served by never finding one. With `max_fpr` it is the highest midpoint with the best recall
    of those that flag no larger share of allowed conversations. `max_fpr_twins` bounds the share of
    `twins`, which are logits, and a balanced threshold too. A stated `threshold` stays as it is.

    The uncertainty band is the narrowest about the threshold, in nats, outside of which at most
    CONFIDENT_ERROR of the verdicts are wrong.
    """
    x = np.asarray(logits, dtype=np.float64)
    y = np.asarray(labels)
    if broken := (~np.isfinite(x)).sum():
        remedy = "The training diverged: lower the learning rate in the recipe"
        got = f"{broken} of {len(x)}"
        raise GuardError("verdict logits are not finite", got=got, remedy=remedy)
    fit = min((fit_temperature, fit_platt), key=lambda fit: _left_out_nll(fit, x, y))
    temperature, bias = fit(x, y)
    kept = _highest_kept(x[y == 0], max_fpr, "max_fpr")
    kept = max(kept, _highest_kept(np.asarray(twins), max_fpr_twins, "max_fpr_twins"))
    neutral = -bias * temperature  # where p = 0.5
    cut = neutral + _balanced_cut(x - neutral, y)
    if threshold is not None:
        cut = temperature * (float(np.log(threshold / (1 - threshold))) - bias)
    elif max_fpr is not None or cut <= kept:
        cut = _cut_above(x, y, kept)
    half_width = _uncertain_nats(x, y, cut)
    p_violation = Calibration(temperature, bias=bias).p_violation
    uncertainty_band = (p_violation(cut - half_width), p_violation(cut + half_width))
    return Calibration(temperature, threshold or p_violation(cut), bias, uncertainty_band)


def left_out_probabilities(x: np.ndarray, y: np.ndarray, *, with_bias: bool) -> np.ndarray:
    """Each row's probability as fitted on the other folds; with too few rows, as fitted on all."""
    fit = fit_platt if with_bias else fit_temperature
    p = _probabilities(x, *fit(x, y))
    for fold in folds(y):
        p[fold] = _probabilities(x[fold], *fit(x[~fold], y[~fold]))
    return p


def fit_temperature(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    targets = _targets(y)
    low, high = np.log(TEMPERATURES)
    minimum = minimize_scalar(
        lambda log_t: _nll(x, targets, np.exp(log_t), 0.0), bounds=(low, high), method="bounded"
    )
    return float(np.exp(minimum.x)), 0.0


def fit_platt(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    targets = _targets(y)
    start = (np.log(fit_temperature(x, y)[0]), 0.0)
    minimum = minimize(
        lambda fitted: _nll(x, targets, np.exp(fitted[0]), fitted[1]),
        start,
        bounds=(tuple(np.log(TEMPERATURES)), BIASES),
        method="L-BFGS-B",
    )
    return float(np.exp(minimum.x[0])), float(minimum.x[1])


def folds(y: np.ndarray) -> list[np.ndarray]:
    """Masks of the rows that are left out in turn; both labels are among the rows that stay."""
    fold_of_row = np.empty(len(y), dtype=int)
    for label in (0, 1):
        fold_of_row[y == label] = np.arange((y == label).sum()) % FOLDS
    masks = [fold_of_row == number for number in range(FOLDS)]
    return [mask for mask in masks if mask.any() and len(set(y[~mask])) == 2]


def _targets(y: np.ndarray) -> np.ndarray:
    n1 = int(y.sum())
    return np.where(y == 1, (n1 + 1) / (n1 + 2), 1 / (len(y) - n1 + 2))


def _nll(x: np.ndarray, targets: np.ndarray, temperature: float, bias: float) -> float:
    scaled = x / temperature + bias
    return float((np.logaddexp(0, scaled) - targets * scaled).mean())


def _left_out_nll(fit: Fit, x: np.ndarray, y: np.ndarray) -> float:
    total = 0.0
    for fold in folds(y):
        temperature, bias = fit(x[~fold], y[~fold])
        total += _nll(x[fold], y[fold], temperature, bias) * fold.sum()
    return float(total)


def _probabilities(x: np.ndarray, temperature: float, bias: float) -> np.ndarray:
    calibration = Calibration(temperature, bias=bias)
    return np.array([calibration.p_violation(logit) for logit in x])


def _highest_kept(allowed: np.ndarray, rate: float | None, key: str) -> float:
    """The logit above which a cut has to be, so that it flags at most that share of `allowed`."""
    check_rows_for_rate(len(allowed), rate, key)
    if rate is None:
        return -np.inf
    return float(np.sort(allowed)[::-1][int(np.floor(rate * len(allowed)))])


def _cut_above(x: np.ndarray, y: np.ndarray, kept: float) -> float:
    """The highest logit with the best recall of those above `kept`, which may be no row's; where
    all of these flag none, the lowest of them.
    """
    is_above = x > kept
    if not is_above.any():
        return kept + 1.0
    violating = x[is_above & (y == 1)]
    lowest_flagged = violating.min() if len(violating) else x[is_above].min()
    return float((x[x < lowest_flagged].max(initial=kept) + lowest_flagged) / 2)


def _uncertain_nats(x: np.ndarray, y: np.ndarray, cut: float) -> float:
    """Half the width of the uncertainty band; infinite where no band leaves enough right."""
    distance = np.abs(x - cut)
    farthest_first = np.argsort(-distance, kind="stable")
    sorted_distance = distance[farthest_first]
    is_wrong = ((x >= cut) != (y == 1))[farthest_first]
    # For a band that ends below each row in turn: the rows outside, and how many are wrong.
    rows_outside = np.arange(1, len(x) + 1)
    wrong_outside = np.cumsum(is_wrong)
    # One more wrong in two more rows: a handful of verdicts that are all right is no proof.
    is_right_enough = (wrong_outside + 1) / (rows_outside + 2) <= CONFIDENT_ERROR
    # Equal distances are all inside or all outside.
    ends_a_tie = np.append(sorted_distance[:-1] != sorted_distance[1:], True)
    possible_ends = np.flatnonzero(is_right_enough & ends_a_tie)
    if len(possible_ends) == 0:
        return float("inf")
    last_outside = int(possible_ends[-1])
    if last_outside == len(x) - 1:
        return 0.0
    return float(sorted_distance[last_outside : last_outside + 2].mean())


def _balanced_cut(x: np.ndarray, y: np.ndarray) -> float:
    """The logit at and above which a conversation violates, where 0 is neutral."""
    false_positives, true_positives, lowest_flagged = roc_curve(y, x, drop_intermediate=False)
    # Without the cuts "never" and "always", and with neutral.
    cuts = np.append((lowest_flagged[1:-1] + lowest_flagged[2:]) / 2, 0.0)
    recall = np.append(true_positives[1:-1], (x[y == 1] >= 0).mean())
    false_positive_rate = np.append(false_positives[1:-1], (x[y == 0] >= 0).mean())
    balanced_accuracy = (1 + recall - false_positive_rate) / 2
    violating = int(y.sum())
    variance = _variance(recall, violating) + _variance(false_positive_rate, len(y) - violating)
    standard_errors = np.sqrt(variance) / 2
    best = balanced_accuracy.argmax()
    good = cuts[balanced_accuracy >= balanced_accuracy[best] - standard_errors[best] - 1e-12]
    # The nearest to neutral, of two as near the lower one.
    nearest_first = np.lexsort((good, np.abs(good)))
    return float(good[nearest_first[0]])


def _variance(rates: np.ndarray, rows: int) -> np.ndarray:
    """The variance of shares of so many rows. Never zero: the next row may be judged wrong."""
    plausible = (rates * rows + 1) / (rows + 2)
    return plausible * (1 - plausible) / rows
