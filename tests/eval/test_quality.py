from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eval.answers import Answer, scored_answers
from eval.quality import Quality, mean_metrics, method_quality
from eval.quality import quality as quality_of
from guard.conversation.example import Example, Message
from tests.eval.conftest import answers


def quality(labels: list[int], answered: list[Answer]) -> Quality:
    return quality_of(scored_answers(labels, answered, range(len(labels))))


def test_an_example_without_an_answer_counts_as_wrong_whatever_its_label() -> None:
    result = quality([1, 1, 0, 0], answers([3.0, None, None, -3.0]))
    assert (result.n, result.answered, result.accuracy) == (4, 2, 0.5)
    # the missing positive is a false negative, the missing negative a false positive
    assert result.metrics["f1"] == pytest.approx(2 * 1 / (2 * 1 + 1 + 1))
    assert result.metrics["auroc"] == 1.0  # over the two that were answered


def test_what_is_not_stated_or_of_one_label_has_no_ranking_metrics() -> None:
    """Rows that were chosen by their label say nothing about a probability."""
    result = quality([1, 0], [Answer(True), Answer(False)])
    assert result.accuracy == 1.0
    for name in ("auroc", "auprc", "recall_at_fpr1", "ece", "confident"):
        assert result.metrics[name] is None
    assert quality([1, 0], answers([2.0, -2.0])).metrics["ece"] is not None
    for name in ("auroc", "auprc", "recall_at_fpr1", "ece"):
        assert quality([0, 0], answers([2.0, -2.0])).metrics[name] is None
    assert mean_metrics([{"a": 0.5, "b": 0.5}, {"a": 1.0, "b": None}]) == {"a": 0.75, "b": None}


def test_at_the_threshold_by_hand() -> None:
    said = [(True, True), (False, True), (True, False), (False, True), (False, True)]
    metrics = quality([1, 1, 0, 0, 0], [Answer(it, 0.0, 0.5, sure) for it, sure in said]).metrics
    assert (metrics["false_positive_rate"], metrics["recall"]) == (pytest.approx(1 / 3), 0.5)
    assert (metrics["confident"], metrics["accuracy_where_confident"]) == (0.8, 0.75)
    allowed = quality([0], [Answer(False)]).metrics
    assert (allowed["false_positive_rate"], allowed["recall"]) == (0.0, None)
    assert allowed["accuracy_where_confident"] is None


def row(number: int, label: int, **meta: object) -> Example:
    """A test row of a group of its own."""
    said = (Message("user", str(number)),)
    return Example(f"e{number}", "toy", said, label, "test", "toy", f"g{number}", meta)


def test_a_stratum_holds_the_rows_that_say_so() -> None:
    rows = [
        row(0, 0, stratum="seen", difficulty="easy"),
        row(1, 1, stratum="seen", difficulty="boundary", stance="does"),
        row(2, 0, stratum="unseen", difficulty="boundary", stance="quotes"),
        row(3, 0, stratum="unseen", difficulty="adversarial", stance="neutral"),
        row(4, 1, stratum="unseen", difficulty="adversarial", stance="asks"),
    ]
    by_seed = {0: answers([-1.0, -1.0, 1.0, -1.0, 1.0])}  # wrong on rows 1 and 2
    strata = method_quality(rows, by_seed).strata
    assert list(strata) == ["seen", "unseen", "easy", "boundary", "adversarial"]
    assert [stratum.n for stratum in strata.values()] == [2, 3, 1, 2, 2]
    accuracy = {name: stratum.accuracy for name, stratum in strata.items()}
    assert (accuracy["boundary"], accuracy["easy"], accuracy["adversarial"]) == (0.0, 1.0, 1.0)


def test_twins_have_a_rate_of_their_own_and_of_fewer_than_ten_there_is_none() -> None:
    rows = [replace(row(number, 0), twin=number < 12) for number in range(20)]
    rows += [row(number, 1) for number in range(20, 30)]
    right = [*[-1.0] * 20, *[1.0] * 10]
    half_wrong = [*[1.0] * 6, *right[6:]]
    twins = method_quality(rows, {0: answers(right), 1: answers(half_wrong)}).twins
    assert (twins.n, twins.fpr) == (12, 0.25) and twins.fpr_ci95 is not None
    assert 0 <= twins.fpr_ci95[0] < 0.25 < twins.fpr_ci95[1] < 1
    assert str(method_quality(rows[3:], {0: answers(right[3:])}).twins) == "too few (9)"


def test_an_auroc_has_an_interval_and_is_compared_with_the_bag_of_words_pair_by_pair() -> None:
    generator = np.random.default_rng(0)
    rows = [row(number, number % 2) for number in range(400)]
    labels = np.array([example.label for example in rows])
    shared = generator.standard_normal(len(rows))  # what makes a row hard for both
    bag = answers((labels + shared).tolist())
    better = {seed: answers((labels * 1.3 + shared).tolist()) for seed in (0, 1)}
    measured, words = method_quality(rows, better, bag_of_words=bag), method_quality(rows, {0: bag})
    gain, area = measured.auroc_minus_bag_of_words, measured.metrics["auroc"]
    interval = measured.auroc_ci95
    assert area is not None and interval is not None and interval[0] < area < interval[1]
    assert gain is not None and gain.mean == pytest.approx(area - (words.metrics["auroc"] or 0))
    assert gain.ci95[0] > 0 and gain.ci95[1] - gain.ci95[0] < (interval[1] - interval[0]) / 2
    assert words.auroc_minus_bag_of_words is None


def test_rows_without_a_logit_are_not_ranked_and_one_label_has_no_auroc() -> None:
    rows = [row(number, number % 2) for number in range(40)]
    logits: list[float | None] = [2.0 * example.label - 1 for example in rows]
    wrong = [*logits[:38], 9.0, None]  # a wrong one, and a refusal
    measured = method_quality(rows, {0: answers(logits), 1: answers(wrong)})
    assert measured.auroc_ci95 is not None and measured.auroc_ci95[0] < 1
    assert measured.answered == 39  # of the worst seed
    assert method_quality(rows[::2], {0: answers(logits[::2])}).auroc_ci95 is None
    unranked = [Answer(True)] * len(rows)
    assert method_quality(rows, {0: unranked}, bag_of_words=unranked).auroc_ci95 is None
