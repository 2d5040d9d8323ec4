from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score

from eval.metrics import (
    Outcomes,
    RankedRows,
    accuracy_interval,
    auprc,
    auroc,
    auroc_difference,
    auroc_draws,
    auroc_estimate,
    bootstrap_mean_difference,
    drawn_seed_weights,
    f1,
    mcnemar_exact_p,
    recall_at_fpr,
    standard_deviation,
    weighted_auroc,
    wilson_interval,
)
from guard.errors import GuardError


@pytest.mark.parametrize(("correct", "total"), [(0, 7), (7, 7), (93, 100), (1, 2), (311, 600)])
def test_wilson_interval_is_scipys(correct: int, total: int) -> None:
    expected = binomtest(correct, total).proportion_ci(method="wilson")
    assert wilson_interval(correct / total, total) == pytest.approx(tuple(expected), abs=1e-9)


def test_wilson_interval_of_a_mean_over_seeds_lies_between_its_whole_neighbours() -> None:
    below, between, above = (wilson_interval(correct / 100, 100) for correct in (90, 90.5, 91))
    assert below[0] < between[0] < above[0]
    assert below[1] < between[1] < above[1]
    assert wilson_interval(0.0, 0) == (0.0, 1.0)
    assert accuracy_interval(_rule([[1] * 40] * 3)) == pytest.approx(wilson_interval(1.0, 40))
    assert standard_deviation([0.9]) is None
    assert standard_deviation([1.0, 2.0, 3.0]) == pytest.approx(1.0)


def test_f1_by_hand() -> None:
    # 2 true positives, 1 false positive, 1 false negative: precision 2/3, recall 2/3
    assert f1([1, 1, 1, 0, 0], [1, 1, 0, 1, 0]) == pytest.approx(2 / 3)
    assert f1([1, 0], [0, 0]) == f1([0, 0], [0, 0]) == 0.0


def test_ranking_by_hand() -> None:
    # pairs (3,1) (3,0) (1,0) in order, (1,1) tied
    assert auroc([1, 1, 0, 0], [3.0, 1.0, 1.0, 0.0]) == pytest.approx(3.5 / 4)
    # ranked 1 0 1: precision 1 at recall 1/2, precision 2/3 at recall 1
    assert auprc([1, 0, 1], [3.0, 2.0, 1.0]) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    # sigmoid(40) and sigmoid(50) are both 1.0 in double precision
    assert auroc([0, 1], [40.0, 50.0]) == 1.0


def test_recall_at_one_percent_fpr_allows_two_in_two_hundred() -> None:
    labels = [0] * 200 + [1] * 4
    logits = [9.0, 8.0, 7.0] + [0.0] * 197 + [10.0, 8.5, 7.5, 6.5]
    # three negatives lie above the last positive, so its threshold costs 1.5 %; the third
    # positive's costs exactly 1 %
    assert recall_at_fpr(labels, logits) == pytest.approx(3 / 4)
    assert recall_at_fpr(labels, logits, max_fpr=0.015) == 1.0
    assert recall_at_fpr(labels, logits, max_fpr=0.0) == pytest.approx(1 / 4)


def test_recall_at_fpr_sees_points_on_a_straight_stretch_of_the_curve() -> None:
    # a positive and a negative tied at each step: the curve is one straight line with a point every
    # 0.005
    labels, logits = [], []
    for step in range(200):
        labels += [1, 0]
        logits += [float(-step)] * 2
    assert recall_at_fpr(labels, logits) == pytest.approx(0.01)


@pytest.mark.parametrize("metric", [auroc, auprc, recall_at_fpr])
def test_ranking_metrics_are_undefined_without_both_classes(metric) -> None:
    assert metric([1, 1], [0.1, 0.2]) is None
    assert metric([], []) is None


def test_mcnemar_is_the_binomial_test_on_discordant_pairs() -> None:
    a = [1] * 10 + [0] * 2 + [1] * 50
    b = [0] * 10 + [1] * 2 + [1] * 50
    assert mcnemar_exact_p(a, b) == pytest.approx(binomtest(2, 12, 0.5).pvalue)
    assert mcnemar_exact_p(a, b) == mcnemar_exact_p(b, a)
    assert mcnemar_exact_p(a, a) == 1.0


def _rule(values: list[list[int]], groups: list[int] | None = None) -> Outcomes:
    array = np.array(values, dtype=np.int8)
    return Outcomes(array, np.array(groups or range(array.shape[1]), dtype=np.int64))


def test_bootstrap_of_a_constant_difference_has_no_width_and_repeats_itself() -> None:
    result = bootstrap_mean_difference([_rule([[1] * 20] * 3), _rule([[0] * 20])], draws=50)
    assert (result.mean, result.ci95) == (0.5, (0.5, 0.5))
    rule = [_rule([[1, 0, -1, 0] * 10])]
    assert bootstrap_mean_difference(rule, draws=200) == bootstrap_mean_difference(rule, draws=200)


def test_bootstrap_interval_is_the_binomials_for_one_seed() -> None:
    result = bootstrap_mean_difference([_rule([[1] * 20 + [0] * 80])])
    half = 1.96 * np.sqrt(0.2 * 0.8 / 100)
    assert result.mean == pytest.approx(0.2)
    assert result.ci95 == pytest.approx((0.2 - half, 0.2 + half), abs=0.015)


@pytest.mark.parametrize("accuracy", [True, False], ids=["an accuracy", "a difference"])
def test_an_interval_grows_when_seeds_differ_and_with_groups(accuracy: bool) -> None:
    def width(rule: Outcomes) -> float:
        ci95 = bootstrap_mean_difference([rule]).ci95
        if accuracy:
            ci95 = accuracy_interval(rule)
        return ci95[1] - ci95[0]

    alike = width(_rule([[1, 0] * 200, [0, 1] * 200]))
    assert width(_rule([[1] * 400, [0] * 400])) > 3 * alike
    values = [[1] * 50 + [0] * 50]
    in_groups = _rule(values, groups=[number // 10 for number in range(100)])
    assert width(in_groups) > 2 * width(_rule(values))


@pytest.mark.parametrize("seeds", [2, 3, 10])
def test_drawn_seeds_vary_as_the_mean_of_the_seeds_does(seeds: int) -> None:
    generator = np.random.default_rng(0)
    values = generator.standard_normal(seeds)
    weights = drawn_seed_weights(seeds, 100_000, generator)
    assert weights.sum(axis=1) == pytest.approx(1.0)
    means = weights @ values
    assert means.mean() == pytest.approx(values.mean(), abs=0.01)
    assert means.var() == pytest.approx(values.var(ddof=1) / seeds, rel=0.05)


def test_an_accuracy_s_interval_is_the_binomial_s_of_its_groups() -> None:
    """Four rows of a group that are all right or all wrong count as one."""
    hundred = [number // 4 for number in range(400)]
    low, high = accuracy_interval(_rule([[1] * 200 + [0] * 200], groups=hundred))
    half = 1.96 * np.sqrt(0.5 * 0.5 / 100)
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.01)


def test_one_group_shows_nothing() -> None:
    """Every draw of groups is the rows themselves, which would make an interval of no width."""
    one = _rule([[1] * 30 + [0] * 10], groups=[0] * 40)
    assert accuracy_interval(one) == (0.0, 1.0)
    assert bootstrap_mean_difference([one]).ci95 == (-1.0, 1.0)
    several = [_rule([[1, 0] * 200])] * 3
    narrow, wider = bootstrap_mean_difference(several), bootstrap_mean_difference([*several, one])
    share = (narrow.ci95[1] - narrow.ci95[0]) * 3 / 4
    assert wider.ci95[1] - wider.ci95[0] == pytest.approx(share + 2 / 4, abs=0.01)


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
    with pytest.raises(GuardError, match="both labels"):
        RankedRows(np.ones(3, dtype=np.int64), np.arange(3))


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


def test_one_group_ranks_nothing() -> None:
    """Every draw of groups is the rows themselves: all of it would be clear."""
    several = rows(40)
    tested = RankedRows(several.labels, np.zeros(40, dtype=np.int64))
    better, worse = noisy(tested, noise=0.5), noisy(tested, noise=2.0)
    estimate = auroc_estimate(tested, better)
    assert estimate.mean == pytest.approx(auroc_estimate(several, better).mean)
    assert estimate.ci95 == (0.0, 1.0)
    difference = auroc_difference(tested, better, worse)
    assert difference.mean > 0 and difference.ci95 == (-1.0, 1.0)
