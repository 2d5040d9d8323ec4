"""AUROC of weighted rows, and what its intervals do and do not hold."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from eval.ranking import RankedRows, auroc_difference, auroc_draws, auroc_estimate, weighted_auroc
from guard.errors import GuardError


def rows(count: int = 200, per_group: int = 1) -> RankedRows:
    labels = np.arange(count // per_group).repeat(per_group) % 2
    return RankedRows(labels, np.arange(count) // per_group)


def noisy(tested: RankedRows, seeds: int = 1, noise: float = 1.0) -> NDArray[np.float64]:
    generator = np.random.default_rng(0)
    return tested.labels + noise * generator.standard_normal((seeds, len(tested.labels)))


@pytest.mark.parametrize("decimals", [8, 0], ids=["no ties", "many ties"])
def test_it_is_scikit_learn_s_auroc_of_rows_repeated_by_weight(decimals: int) -> None:
    tested = rows(60)
    (logits,) = noisy(tested).round(decimals)
    weights = np.random.default_rng(1).integers(0, 4, size=(5, 60)).astype(float)
    ours = weighted_auroc(logits, tested.labels, weights)
    for value, of_row in zip(ours, weights.astype(int), strict=True):
        repeated = np.repeat(np.arange(60), of_row)
        expected = roc_auc_score(tested.labels[repeated], logits[repeated])
        assert value == pytest.approx(expected)


def test_ties_count_half_and_a_draw_of_one_label_counts_nothing() -> None:
    labels = np.array([0, 1])
    weights = np.array([[1.0, 1.0], [2.0, 0.0]])
    assert weighted_auroc(np.array([1.0, 1.0]), labels, weights)[0] == 0.5
    assert np.isnan(weighted_auroc(np.array([1.0, 1.0]), labels, weights)[1])
    estimate = auroc_estimate(RankedRows(labels, labels), np.array([[0.0, 1.0]]))
    assert (estimate.mean, estimate.ci95) == (1.0, (1.0, 1.0))


def test_the_interval_is_as_wide_as_hanley_and_mcneil_s() -> None:
    """J. A. Hanley and B. J. McNeil, Radiology 143 (1982): a standard error of the AUROC."""
    tested = rows(400)
    estimate = auroc_estimate(tested, noisy(tested))
    a, n = estimate.mean, 200
    q1, q2 = a / (2 - a), 2 * a**2 / (1 + a)
    error = ((a * (1 - a) + (n - 1) * (q1 + q2 - 2 * a**2)) / n**2) ** 0.5
    low, high = estimate.ci95
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert low < a < high


def test_rows_of_one_group_are_drawn_together() -> None:
    """Ten copies of each row say no more than one."""
    alone, copies = rows(60), rows(600, per_group=10)
    logits = noisy(alone)
    once = auroc_estimate(alone, logits).ci95
    ten_times = auroc_estimate(copies, logits.repeat(10, axis=1)).ci95
    assert ten_times == pytest.approx(once, abs=0.02)


def test_seeds_that_differ_widen_the_interval() -> None:
    tested = rows()
    alike = noisy(tested, 1).repeat(3, axis=0)
    differing = np.concatenate([alike[:2], -alike[:1]])
    assert auroc_estimate(tested, differing).by_seed[2] == pytest.approx(
        1 - auroc_estimate(tested, alike).mean
    )
    low, high = auroc_estimate(tested, differing).ci95
    of_alike = auroc_estimate(tested, alike).ci95
    assert high - low > 3 * (of_alike[1] - of_alike[0])


def test_a_paired_difference_is_narrower_than_its_parts_and_zero_of_the_same() -> None:
    tested = rows()
    first = noisy(tested, 2)
    slightly_better = first + 0.2 * tested.labels
    same = auroc_difference(tested, first, first)
    assert (same.mean, same.ci95) == (0.0, (0.0, 0.0))
    better = auroc_difference(tested, slightly_better, first)
    assert better.ci95[0] > 0
    whole = auroc_estimate(tested, first).ci95
    assert better.ci95[1] - better.ci95[0] < (whole[1] - whole[0]) / 3
    worse = auroc_difference(tested, first, slightly_better)
    assert worse.mean == -better.mean


def test_the_same_seed_draws_the_same() -> None:
    tested = rows()
    logits = noisy(tested, 2)
    assert (auroc_draws(tested, logits) == auroc_draws(tested, logits)).all()
    assert (auroc_draws(tested, logits, seed=1) != auroc_draws(tested, logits)).any()


def test_rows_of_one_label_are_refused() -> None:
    with pytest.raises(GuardError, match="both labels"):
        RankedRows(np.ones(3, dtype=np.int64), np.arange(3))


def test_one_group_shows_nothing() -> None:
    """Every draw of groups is the rows themselves: all of it would be clear."""
    several = rows(40)
    tested = RankedRows(several.labels, np.zeros(40, dtype=np.int64))
    better, worse = noisy(tested, noise=0.5), noisy(tested, noise=2.0)
    estimate = auroc_estimate(tested, better)
    assert estimate.mean == pytest.approx(auroc_estimate(several, better).mean)
    assert estimate.ci95 == (0.0, 1.0)
    difference = auroc_difference(tested, better, worse)
    assert difference.mean > 0 and difference.ci95 == (-1.0, 1.0)
