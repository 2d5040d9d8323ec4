"""AUROC over seeds, and differences of it, with bootstrap intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval.metrics import BOOTSTRAP_DRAWS, auroc, drawn_seed_weights
from guard.errors import GuardError


@dataclass(frozen=True)
class RankedRows:
    """The rows that are ranked: labels (1 = violates) and groups, both [rows].

    Rows of one group share a context and are drawn together.
    """

    labels: NDArray[np.int64]
    groups: NDArray[np.int64]

    def __post_init__(self) -> None:
        if len(np.unique(self.labels)) < 2:
            remedy = "Have test rows of both labels"
            raise GuardError("an AUROC needs rows of both labels", remedy=remedy)

    @property
    def is_one_group(self) -> bool:
        """Then nothing can be drawn, and an interval is as wide as it may be."""
        return len(np.unique(self.groups)) < 2


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, each seed's value, and the mean's 95 % interval."""

    mean: float
    ci95: tuple[float, float]
    by_seed: tuple[float, ...]


def auroc_estimate(rows: RankedRows, logits: NDArray[np.float64]) -> Estimate:
    """The AUROC of logits, [seeds, rows], with a percentile bootstrap over seeds and groups."""
    by_seed = _by_seed(rows, logits)
    if rows.is_one_group:
        return Estimate(float(by_seed.mean()), (0.0, 1.0), tuple(by_seed.tolist()))
    return _estimate(by_seed, auroc_draws(rows, logits))


def auroc_difference(
    rows: RankedRows, minuend: NDArray[np.float64], subtrahend: NDArray[np.float64]
) -> Estimate:
    """How much higher the AUROC of the first logits is, both [seeds, rows].

    The bootstrap is paired: each draw takes the same seeds and groups of both, so what makes a row
    or a draw of training rows hard for both cancels out.
    """
    by_seed = _by_seed(rows, minuend) - _by_seed(rows, subtrahend)
    if rows.is_one_group:
        return Estimate(float(by_seed.mean()), (-1.0, 1.0), tuple(by_seed.tolist()))
    return _estimate(by_seed, auroc_draws(rows, minuend) - auroc_draws(rows, subtrahend))


def auroc_draws(
    rows: RankedRows, logits: NDArray[np.float64], *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0
) -> NDArray[np.float64]:
    """Bootstrap means of the AUROC over seeds, [draws]. Each draws seeds (`drawn_seed_weights`) and
    as many groups as there are, with replacement; NaN where a draw has rows of one label only.

    The same `seed` draws the same seeds and groups for any logits of the same shape.
    """
    generator = np.random.default_rng(seed)
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
    """The AUROC of each draw, [draws]: Mann and Whitney's U as a share, ties counted half.

    `weights`, [draws, rows]: how many times each row counts in each draw.
    """
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


def _estimate(by_seed: NDArray[np.float64], drawn: NDArray[np.float64]) -> Estimate:
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return Estimate(float(by_seed.mean()), (float(low), float(high)), tuple(by_seed.tolist()))
