from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score

from eval import metrics
from guard.errors import GuardError


@pytest.mark.parametrize(("correct", "total"), [(0, 7), (7, 7), (93, 100), (311, 600)])
def test_wilson_interval_is_scipys(correct: int, total: int) -> None:
    expected = binomtest(correct, total).proportion_ci(method="wilson")
    assert metrics.wilson_interval(correct / total, total) == pytest.approx(
        tuple(expected), abs=1e-9
    )
    assert metrics.wilson_interval(0.0, 0) == (0.0, 1.0)
    assert metrics.accuracy_interval(_rule([[1] * 40] * 3)) == pytest.approx(
        metrics.wilson_interval(1.0, 40)
    )


def test_recall_at_one_percent_fpr_allows_two_in_two_hundred() -> None:
    labels = [0] * 200 + [1] * 4
    logits = [9.0, 8.0, 7.0] + [0.0] * 197 + [10.0, 8.5, 7.5, 6.5]
    # three negatives lie above the last positive, so its threshold costs 1.5 %; the third
    # positive's costs exactly 1 %
    assert metrics.recall_at_fpr(labels, logits) == pytest.approx(3 / 4)
    assert metrics.recall_at_fpr(labels, logits, max_fpr=0.015) == 1.0
    assert metrics.recall_at_fpr(labels, logits, max_fpr=0.0) == pytest.approx(1 / 4)
    # A positive and a negative tied at each step: one straight line with a point every 0.005.
    steps = np.arange(200.0).repeat(2)
    assert metrics.recall_at_fpr([1, 0] * 200, -steps) == pytest.approx(0.01)


def _rule(values: list[list[int]], groups: list[int] | None = None) -> metrics.Outcomes:
    array = np.array(values, dtype=np.int8)
    return metrics.Outcomes(array, np.array(groups or range(array.shape[1]), dtype=np.int64))


def test_a_difference_has_the_binomial_s_interval_and_a_constant_one_has_no_width() -> None:
    result = metrics.bootstrap_mean_difference([_rule([[1] * 20 + [0] * 80])])
    half = 1.96 * np.sqrt(0.2 * 0.8 / 100)
    assert result.mean == pytest.approx(0.2)
    assert result.ci95 == pytest.approx((0.2 - half, 0.2 + half), abs=0.015)
    constant = metrics.bootstrap_mean_difference([_rule([[1] * 20] * 3), _rule([[0] * 20])])
    assert (constant.mean, constant.ci95) == (0.5, (0.5, 0.5))


def width(ci95: tuple[float, float]) -> float:
    return ci95[1] - ci95[0]


def test_an_accuracy_s_interval_grows_when_seeds_differ_and_is_the_binomial_s_of_its_groups() -> (
    None
):
    """Four rows of a group that are all right or all wrong count as one."""
    alike, differing = _rule([[1, 0] * 200, [0, 1] * 200]), _rule([[1] * 400, [0] * 400])
    assert width(metrics.accuracy_interval(differing)) > 3 * width(metrics.accuracy_interval(alike))
    by_difference = [metrics.bootstrap_mean_difference([rule]).ci95 for rule in (alike, differing)]
    assert width(by_difference[1]) > 3 * width(by_difference[0])
    hundred = [number // 4 for number in range(400)]
    half = 1.96 * np.sqrt(0.5 * 0.5 / 100)
    in_groups = metrics.accuracy_interval(_rule([[1] * 200 + [0] * 200], groups=hundred))
    assert in_groups == pytest.approx((0.5 - half, 0.5 + half), abs=0.01)


@pytest.mark.parametrize("seeds", [2, 3, 10])
def test_drawn_seeds_vary_as_the_mean_of_the_seeds_does(seeds: int) -> None:
    generator = np.random.default_rng(0)
    values = generator.standard_normal(seeds)
    means = metrics.drawn_seed_weights(seeds, 100_000, generator) @ values
    assert means.mean() == pytest.approx(values.mean(), abs=0.01)
    assert means.var() == pytest.approx(values.var(ddof=1) / seeds, rel=0.05)


def test_one_group_shows_nothing() -> None:
    """Every draw of groups is the rows themselves, which would make an interval of no width."""
    one = _rule([[1] * 30 + [0] * 10], groups=[0] * 40)
    assert metrics.accuracy_interval(one) == (0.0, 1.0)
    assert metrics.bootstrap_mean_difference([one]).ci95 == (-1.0, 1.0)
    several = [_rule([[1, 0] * 200])] * 3
    narrow, wider = (
        metrics.bootstrap_mean_difference(several),
        metrics.bootstrap_mean_difference([*several, one]),
    )
    assert width(wider.ci95) == pytest.approx(width(narrow.ci95) * 3 / 4 + 2 / 4, abs=0.01)
    tested = metrics.RankedRows(rows(40).labels, np.zeros(40, dtype=np.int64))
    better, worse = noisy(tested, noise=0.5), noisy(tested, noise=2.0)
    assert metrics.auroc_estimate(tested, better).ci95 == (0.0, 1.0)
    difference = metrics.auroc_difference(tested, better, worse)
    assert difference.mean > 0 and difference.ci95 == (-1.0, 1.0)


def rows(count: int = 200, per_group: int = 1) -> metrics.RankedRows:
    labels = np.arange(count // per_group).repeat(per_group) % 2
    return metrics.RankedRows(labels, np.arange(count) // per_group)


def noisy(tested: metrics.RankedRows, seeds: int = 1, noise: float = 1.0) -> NDArray[np.float64]:
    generator = np.random.default_rng(0)
    return tested.labels + noise * generator.standard_normal((seeds, len(tested.labels)))


@pytest.mark.parametrize("decimals", [8, 0], ids=["no ties", "many ties"])
def test_it_is_scikit_learn_s_auroc_of_rows_repeated_by_weight(decimals: int) -> None:
    tested = rows(60)
    (logits,) = noisy(tested).round(decimals)
    weights = np.random.default_rng(1).integers(0, 4, size=(5, 60)).astype(float)
    ours = metrics.weighted_auroc(logits, tested.labels, weights)
    for value, of_row in zip(ours, weights.astype(int), strict=True):
        repeated = np.repeat(np.arange(60), of_row)
        expected = roc_auc_score(tested.labels[repeated], logits[repeated])
        assert value == pytest.approx(expected)


def test_ties_count_half_and_a_draw_of_one_label_counts_nothing() -> None:
    labels = np.array([0, 1])
    weights = np.array([[1.0, 1.0], [2.0, 0.0]])
    assert metrics.weighted_auroc(np.array([1.0, 1.0]), labels, weights)[0] == 0.5
    assert np.isnan(metrics.weighted_auroc(np.array([1.0, 1.0]), labels, weights)[1])
    estimate = metrics.auroc_estimate(metrics.RankedRows(labels, labels), np.array([[0.0, 1.0]]))
    assert (estimate.mean, estimate.ci95) == (1.0, (1.0, 1.0))
    with pytest.raises(GuardError, match="both labels"):
        metrics.RankedRows(np.ones(3, dtype=np.int64), np.arange(3))


def test_the_interval_is_as_wide_as_hanley_and_mcneil_s() -> None:
    """J. A. Hanley and B. J. McNeil, Radiology 143 (1982): a standard error of the AUROC."""
    tested = rows(400)
    estimate = metrics.auroc_estimate(tested, noisy(tested))
    a, n = estimate.mean, 200
    q1, q2 = a / (2 - a), 2 * a**2 / (1 + a)
    error = ((a * (1 - a) + (n - 1) * (q1 + q2 - 2 * a**2)) / n**2) ** 0.5
    assert width(estimate.ci95) == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert estimate.ci95[0] < a < estimate.ci95[1]


def test_rows_of_one_group_are_drawn_together() -> None:
    """Ten copies of each row say no more than one."""
    alone, copies = rows(60), rows(600, per_group=10)
    logits = noisy(alone)
    once = metrics.auroc_estimate(alone, logits).ci95
    ten_times = metrics.auroc_estimate(copies, logits.repeat(10, axis=1)).ci95
    assert ten_times == pytest.approx(once, abs=0.02)


def test_a_paired_difference_is_narrower_than_its_parts_and_zero_of_the_same() -> None:
    tested = rows()
    first = noisy(tested, 2)
    slightly_better = first + 0.2 * tested.labels
    same = metrics.auroc_difference(tested, first, first)
    assert (same.mean, same.ci95) == (0.0, (0.0, 0.0))
    better = metrics.auroc_difference(tested, slightly_better, first)
    assert better.ci95[0] > 0
    assert width(better.ci95) < width(metrics.auroc_estimate(tested, first).ci95) / 3
    assert metrics.auroc_difference(tested, first, slightly_better).mean == -better.mean
