from __future__ import annotations

import pytest

from eval.answer import Answer
from eval.quality import METRICS, Metric, mean_over, quality
from tests.eval.conftest import answers


def test_an_example_without_an_answer_counts_as_wrong_whatever_its_label() -> None:
    result = quality([1, 1, 0, 0], answers([3.0, None, None, -3.0]))
    assert (result.n, result.answered) == (4, 2)
    assert result.accuracy == 0.5
    # the missing positive is a false negative, the missing negative a false positive
    assert result.metrics["f1"] == pytest.approx(2 * 1 / (2 * 1 + 1 + 1))
    assert result.metrics["auroc"] == 1.0  # over the two that were answered


def test_a_bare_yes_or_no_has_no_ranking_metrics() -> None:
    result = quality([1, 0], [Answer(True), Answer(False)])
    assert result.accuracy == 1.0
    assert (
        result.metrics["auroc"],
        result.metrics["auprc"],
        result.metrics["recall_at_fpr1"],
        result.metrics["ece"],
    ) == (
        None,
        None,
        None,
        None,
    )


def test_at_the_threshold_by_hand() -> None:
    answered = [
        Answer(flagged, 0.0, 0.5, sure)
        for flagged, sure in (
            (True, True),
            (False, True),
            (True, False),
            (False, True),
            (False, True),
        )
    ]
    result = quality([1, 1, 0, 0, 0], answered)
    assert (result.metrics["false_positive_rate"], result.metrics["recall"]) == (
        pytest.approx(1 / 3),
        0.5,
    )
    assert (result.metrics["confident"], result.metrics["accuracy_where_confident"]) == (0.8, 0.75)
    allowed = quality([0], [Answer(False)])
    assert (
        allowed.metrics["false_positive_rate"],
        allowed.metrics["recall"],
        allowed.metrics["confident"],
        allowed.metrics["accuracy_where_confident"],
    ) == (0.0, None, None, None)


def test_a_mean_over_some_is_no_mean() -> None:
    assert mean_over([0.5, 1.0]) == 0.75
    assert mean_over([0.5, None]) is None
    assert mean_over([]) is None


def test_a_metric_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "flagged", Metric("flagged", lambda it: it.decisions.mean()))
    assert quality([1, 0, 0], answers([1.0, 1.0, -1.0])).metrics["flagged"] == pytest.approx(2 / 3)
