"""How good a set of verdicts is, in numbers. Knows nothing of rules, models or files: arrays in, floats out.

`labels` are 1 where the example violates its rule, `logits` rank examples (higher = more likely a violation), `correct` is
true where the decision equals the label. All arrays are of shape (examples,) unless stated otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binomtest
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score, roc_curve

Z95 = 1.959963984540054  # the standard normal's 97.5 % quantile
ECE_BINS = 15  # Guo et al., 2017
BOOTSTRAP_DRAWS = 2_000


def wilson_interval(accuracy: float, total: int) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson, 1927).

    For a mean over seeds `accuracy * total` need not be whole. The interval then still treats the examples as the sample, which
    is conservative: averaging over seeds only takes variance away.
    """
    if total == 0:
        return 0.0, 1.0
    shrink = 1 + Z95**2 / total
    centre = (accuracy + Z95**2 / (2 * total)) / shrink
    half = Z95 / shrink * math.sqrt(accuracy * (1 - accuracy) / total + Z95**2 / (4 * total**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def f1(labels: ArrayLike, decisions: ArrayLike) -> float:
    """Harmonic mean of precision and recall on the violating class; 0 where there is no true positive."""
    return float(f1_score(np.asarray(labels), np.asarray(decisions), zero_division=0))


def auroc(labels: ArrayLike, logits: ArrayLike) -> float | None:
    """Area under the ROC curve, ties counted half. None where the labels are all the same."""
    return float(roc_auc_score(labels, logits)) if _both_classes(labels) else None


def auprc(labels: ArrayLike, logits: ArrayLike) -> float | None:
    """Average precision: the area under the precision-recall steps, not interpolated. None where the labels are all the same."""
    return float(average_precision_score(labels, logits)) if _both_classes(labels) else None


def recall_at_fpr(labels: ArrayLike, logits: ArrayLike, max_fpr: float = 0.01) -> float | None:
    """The largest recall of any threshold whose false-positive rate is at most `max_fpr`. None where the labels are all the same.

    With fewer than `1 / max_fpr` examples that do not violate, this is the recall without any false positive.
    """
    if not _both_classes(labels):
        return None
    # sklearn's default drops points on straight stretches of the curve, and the one just below `max_fpr` may be among them
    false_positive_rate, recall, _ = roc_curve(labels, logits, drop_intermediate=False)
    return float(recall[false_positive_rate <= max_fpr].max())


def expected_calibration_error(labels: ArrayLike, p_violation: ArrayLike, bins: int = ECE_BINS) -> float | None:
    """Mean |share that violates - mean p_violation| over equal-width bins of p_violation, weighted by size (Naeini et al., 2015).

    This is the form for the positive class: it judges the probability users see, not the confidence in the decision. None for no examples.
    """
    truth, p = np.asarray(labels, dtype=float), np.asarray(p_violation, dtype=float)
    if p.size == 0:
        return None
    bin_of = np.minimum((p * bins).astype(int), bins - 1)
    gaps = np.bincount(bin_of, weights=truth - p, minlength=bins)
    return float(np.abs(gaps).sum() / p.size)


def mcnemar_exact_p(correct_a: ArrayLike, correct_b: ArrayLike) -> float:
    """Two-sided exact p that two methods err equally often on the same examples (McNemar, 1947): binomial on the discordant pairs."""
    a, b = np.asarray(correct_a, dtype=bool), np.asarray(correct_b, dtype=bool)
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    return float(binomtest(only_a, only_a + only_b, 0.5).pvalue) if only_a + only_b else 1.0


def standard_deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1) over seeds. None for fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


@dataclass(frozen=True)
class PairedDifferences:
    """Right minus right, per seed and example, of two methods on one rule.

    `values` has shape (seeds, examples) and holds -1, 0 or 1. `groups`, of shape (examples,), numbers the examples' groups from 0:
    rows of one group share a context and are drawn together.
    """

    values: NDArray[np.int8]
    groups: NDArray[np.int64]


@dataclass(frozen=True)
class MeanDifference:
    """A mean of accuracy differences with its 95 % interval."""

    mean: float
    ci95: tuple[float, float]


def bootstrap_mean_difference(rules: Sequence[PairedDifferences], *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> MeanDifference:
    """Mean over rules of the accuracy difference, with a paired percentile bootstrap over seeds and groups (Efron, 1979).

    Each draw takes, rule by rule, as many seeds and as many groups as there are, with replacement. Both methods are always taken
    together, so what makes an example or a seed hard for both cancels out. The rules themselves are not drawn: the interval is
    about these rules.
    """
    generator = np.random.default_rng(seed)
    total = np.zeros(draws)
    for rule in rules:
        seeds, groups = len(rule.values), int(rule.groups.max()) + 1
        by_group = np.zeros((seeds, groups))
        for row, values in enumerate(rule.values):
            by_group[row] = np.bincount(rule.groups, weights=values, minlength=groups)
        size_of_group = np.bincount(rule.groups, minlength=groups)
        for draw in range(draws):
            seed_weight = np.bincount(generator.integers(seeds, size=seeds), minlength=seeds) / seeds
            group_weight = np.bincount(generator.integers(groups, size=groups), minlength=groups)
            total[draw] += (seed_weight @ by_group) @ group_weight / (size_of_group @ group_weight)
    means = total / len(rules)
    low, high = np.quantile(means, [0.025, 0.975])
    return MeanDifference(float(np.mean([rule.values.mean() for rule in rules])), (float(low), float(high)))


def _both_classes(labels: ArrayLike) -> bool:
    return len(np.unique(np.asarray(labels))) == 2
