"""How good a set of verdicts is, in numbers: arrays in, floats out.

`labels` are 1 where the example violates its rule, `logits` rank examples (higher = more likely a
violation), `correct` is true where the decision equals the label. All arrays are of shape
(examples,) unless stated otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import roc_auc_score, roc_curve

from guard.errors import GuardError
from guard.files.yaml_file import Strict

Z95 = 1.959963984540054  # the standard normal's 97.5 % quantile
BOOTSTRAP_DRAWS = 2_000


def wilson_interval(accuracy: float, total: int) -> tuple[float, float]:
    """95 % score interval (Wilson, 1927); of a mean over seeds, right answers may be a fraction."""
    if total == 0:
        return 0.0, 1.0
    shrink = 1 + Z95**2 / total
    centre = (accuracy + Z95**2 / (2 * total)) / shrink
    half = Z95 / shrink * math.sqrt(accuracy * (1 - accuracy) / total + Z95**2 / (4 * total**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def auroc(labels: ArrayLike, logits: ArrayLike) -> float | None:
    """None where the labels are all the same; ties count half."""
    if not has_both(labels):
        return None
    return float(roc_auc_score(labels, logits))


def recall_at_fpr(labels: ArrayLike, logits: ArrayLike, max_fpr: float = 0.01) -> float:
    """The largest recall of any threshold whose false-positive rate is at most `max_fpr`. With
    fewer than `1 / max_fpr` examples that do not violate: the recall without any false positive.
    """
    # sklearn's default drops points on straight stretches of the curve, and the one just below
    # `max_fpr` may be among them
    false_positive_rate, recall, _ = roc_curve(labels, logits, drop_intermediate=False)
    return float(recall[false_positive_rate <= max_fpr].max())


def standard_deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1) over seeds. None for fewer than two."""
    if len(values) < 2:
        return None
    return float(np.std(values, ddof=1))


@dataclass(frozen=True)
class Outcomes:
    """A number per seed and example on one rule: 1 for right and 0 for wrong, or the difference of
    two methods' (-1, 0, 1). `values` has shape (seeds, examples). `groups`, of shape (examples,),
    numbers the examples' groups from 0: rows of one group share a context and are drawn together.
    """

    values: NDArray[np.int8] | NDArray[np.float64]
    groups: NDArray[np.int64]


def is_one_group(groups: NDArray[np.int64]) -> bool:
    """Whether nothing can be drawn, so that an interval is as wide as it may be."""
    return len(np.unique(groups)) < 2


class Difference(Strict):
    """A mean of differences with its paired 95 % interval."""

    mean: float
    ci95: tuple[float, float]


def accuracy_interval(outcomes: Outcomes) -> tuple[float, float]:
    """95 % interval of a mean accuracy: at each end the wider one of two intervals, the bootstrap's
    over seeds and groups, and Wilson's. The bootstrap sees that seeds differ and that rows of one
    group are right or wrong together. Wilson's sees neither, but keeps its width where every answer
    is right.
    """
    if is_one_group(outcomes.groups):
        return 0.0, 1.0
    means = _bootstrap_means(outcomes, np.random.default_rng(0))
    low, high = np.quantile(means, [0.025, 0.975]).tolist()
    wilson = wilson_interval(float(outcomes.values.mean()), outcomes.values.shape[1])
    return min(low, wilson[0]), max(high, wilson[1])


def bootstrap_mean_difference(rules: Sequence[Outcomes]) -> Difference:
    """Mean over rules of the accuracy difference, with a paired percentile bootstrap over seeds and
    groups (Efron, 1979). Both methods are always taken together, so what makes an example or a seed
    hard for both cancels out. The rules themselves are not drawn: the interval is about these
    rules.
    """
    generator = np.random.default_rng(0)
    drawable = [rule for rule in rules if not is_one_group(rule.groups)]
    drawn = [_bootstrap_means(rule, generator) for rule in drawable]
    low, high = 0.0, 0.0
    if drawn:
        low, high = np.quantile(np.sum(drawn, axis=0) / len(rules), [0.025, 0.975]).tolist()
    # A rule of which nothing can be drawn may have any difference from -1 to 1.
    undrawn_share = (len(rules) - len(drawn)) / len(rules)
    mean = float(np.mean([rule.values.mean() for rule in rules]))
    return Difference(mean=mean, ci95=(low - undrawn_share, high + undrawn_share))


def drawn_seed_weights(
    seeds: int, draws: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """What each seed counts in each draw of a bootstrap, [draws, seeds]; a draw's sum is 1. One
    seed less is drawn than there are: a mean of n seeds drawn from n varies by (n - 1) / n of the
    variance of their mean, of three seeds by two thirds, drawn from n - 1 by all of it (Rao and Wu,
    1988, "Resampling inference with complex survey data").
    """
    drawn = max(1, seeds - 1)
    counts = generator.multinomial(drawn, np.full(seeds, 1 / seeds), size=draws)
    weights: NDArray[np.float64] = counts / drawn
    return weights


def _bootstrap_means(outcomes: Outcomes, generator: np.random.Generator) -> NDArray[np.float64]:
    """Bootstrap means, [draws], over seeds (`drawn_seed_weights`) and all groups."""
    seeds, draws = len(outcomes.values), BOOTSTRAP_DRAWS
    _, group_of, sizes = np.unique(outcomes.groups, return_inverse=True, return_counts=True)
    by_group = np.stack([np.bincount(group_of, weights=values) for values in outcomes.values])
    seed_weights = drawn_seed_weights(seeds, draws, generator)
    groups = len(sizes)
    group_weights = generator.multinomial(groups, np.full(groups, 1 / groups), size=draws)
    mean_over_seeds = seed_weights @ by_group
    sums: NDArray[np.float64] = (mean_over_seeds * group_weights).sum(axis=1)
    drawn_rows = group_weights @ sizes
    return sums / drawn_rows


def has_both(labels: ArrayLike) -> bool:
    return len(np.unique(np.asarray(labels))) == 2


@dataclass(frozen=True)
class RankedRows:
    """Labels (1 = violates) and groups, both [rows]; rows of a group are drawn together."""

    labels: NDArray[np.int64]
    groups: NDArray[np.int64]

    def __post_init__(self) -> None:
        if len(np.unique(self.labels)) < 2:
            remedy = "Have test rows of both labels"
            raise GuardError("an AUROC needs rows of both labels", remedy=remedy)


class Estimate(Strict):
    """A mean over seeds, each seed's value, and the mean's 95 % interval."""

    mean: float
    ci95: tuple[float, float]
    by_seed: tuple[float, ...]


def auroc_estimate(rows: RankedRows, logits: NDArray[np.float64]) -> Estimate:
    """The AUROC of logits, [seeds, rows], with a percentile bootstrap over seeds and groups."""
    by_seed = _by_seed(rows, logits)
    if is_one_group(rows.groups):
        return _estimate(by_seed, (0.0, 1.0))
    return _estimate(by_seed, _interval(auroc_draws(rows, logits)))


def auroc_difference(
    rows: RankedRows, minuend: NDArray[np.float64], subtrahend: NDArray[np.float64]
) -> Estimate:
    """How much higher the AUROC of the first logits is, both [seeds, rows]. The bootstrap is
    paired: each draw takes the same seeds and groups of both, so what makes a row or a draw of
    training rows hard for both cancels out.
    """
    by_seed = _by_seed(rows, minuend) - _by_seed(rows, subtrahend)
    if is_one_group(rows.groups):
        return _estimate(by_seed, (-1.0, 1.0))
    return _estimate(by_seed, _interval(auroc_draws(rows, minuend) - auroc_draws(rows, subtrahend)))


def auroc_draws(rows: RankedRows, logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bootstrap means of the AUROC over seeds, [draws]. Each draws seeds (`drawn_seed_weights`) and
    as many groups as there are, with replacement; NaN where a draw has rows of one label only.
    Seeds and groups are the same for any logits of the same shape.
    """
    draws, generator = BOOTSTRAP_DRAWS, np.random.default_rng(0)
    _, group_of = np.unique(rows.groups, return_inverse=True)
    groups = int(group_of.max()) + 1
    seed_weights = drawn_seed_weights(len(logits), draws, generator)
    group_counts = generator.multinomial(groups, np.full(groups, 1 / groups), size=draws)
    weights = group_counts[:, group_of].astype(np.float64)
    by_seed = [weighted_auroc(of_seed, rows.labels, weights) for of_seed in logits]
    means: NDArray[np.float64] = (seed_weights.T * np.stack(by_seed)).sum(axis=0)
    return means


def weighted_auroc(
    logits: NDArray[np.float64], labels: NDArray[np.int64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The AUROC of each draw: Mann and Whitney's U, ties half. `weights`: [draws, rows]."""
    order = np.argsort(logits, kind="stable")
    _, starts = np.unique(logits[order], return_index=True)
    violating = np.add.reduceat((weights * labels)[:, order], starts, axis=1)
    allowed = np.add.reduceat((weights * (1 - labels))[:, order], starts, axis=1)
    allowed_below = np.cumsum(allowed, axis=1) - allowed
    won = (violating * (allowed_below + allowed / 2)).sum(axis=1)
    pairs = violating.sum(axis=1) * allowed.sum(axis=1)
    share: NDArray[np.float64] = np.full(len(won), np.nan)
    np.divide(won, pairs, out=share, where=pairs > 0)
    return share


def _by_seed(rows: RankedRows, logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([auroc(rows.labels, of_seed) for of_seed in logits], dtype=np.float64)


def _interval(drawn: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def _estimate(by_seed: NDArray[np.float64], ci95: tuple[float, float]) -> Estimate:
    return Estimate(mean=float(by_seed.mean()), ci95=ci95, by_seed=tuple(by_seed.tolist()))
