"""Metrics of the validation split: hand-made ones, intervals, and honest reliability."""

from __future__ import annotations

import numpy as np
import pytest
from pytest import MonkeyPatch
from sklearn.metrics import roc_auc_score

from guard.calibrate import calibrate
from guard.verdict import Calibration
from tests.guard.test_calibrate import sample
from train.calibration import validation
from train.calibration.validation import calibrated_loss, validation_loss, validation_metrics


def test_what_the_probabilities_are_worth_is_measured_on_rows_that_were_not_fitted() -> None:
    """Ten rows without any signal.

    Fitted on all of them the probability is their share, left out it is wrong about every one.
    """
    labels = [0, 1] * 400
    honest = validation_metrics(*sample(0.0), calibrate(*sample(0.0)))
    assert honest["ece"] < 0.03
    noise = np.random.default_rng(0).normal(size=len(labels)).tolist()
    assert validation_metrics(noise, labels, calibrate(noise, labels))["ece"] < 0.06
    few = [-3.0, -2.5, 2.8, -1.0, -0.5, 0.4, 1.2, -2.7, 2.2, 3.1]  # two are far off
    few_labels = [0] * 5 + [1] * 5
    found = calibrate(few, few_labels)
    fitted = np.sort([found.p_violation(logit) for logit in few])
    bins = validation_metrics(few, few_labels, found)["reliability"]  # of one row each
    measured = np.array([one["p"] for one in bins])
    assert len(measured) == len(fitted)
    assert np.abs(np.sort(measured) - fitted).max() > 0.01


def test_the_reliability_bins_hold_equally_many_rows_and_what_they_are_worth() -> None:
    logits, labels = sample(0.0)
    bins = validation_metrics(logits, labels, calibrate(logits, labels))["reliability"]
    assert [one["n"] for one in bins] == [200] * 10
    assert all(one["ci95"][0] - 0.02 <= one["p"] <= one["ci95"][1] + 0.02 for one in bins)
    assert bins[0]["violates"] < 0.1 < 0.9 < bins[-1]["violates"]


def test_metrics_of_a_hand_made_split() -> None:
    metrics = validation_metrics([-2.0, 1.0, 2.0, 3.0], [0, 0, 1, 1], Calibration())
    expected = {"n": 4, "accuracy": 0.75, "balanced_accuracy": 0.75, "f1": 0.8, "auroc": 1.0}
    expected["accuracy_ci95"] = [0.3006, 0.9544]  # Wilson's interval for 3 of 4
    assert expected.items() <= metrics.items()
    assert metrics["nll"] == pytest.approx(0.4039, abs=1e-4)


def test_the_auroc_is_sklearn_s_with_ties_too() -> None:
    labels = np.arange(50) % 2
    logits = np.random.default_rng(1).normal(labels, 1.0).round(1)
    metrics = validation_metrics(logits.tolist(), labels.tolist(), Calibration())
    assert metrics["auroc"] == pytest.approx(roc_auc_score(labels, logits), abs=1e-4)
    low, high = metrics["auroc_ci95"]
    assert low < metrics["auroc"] < high


def test_the_interval_of_the_auroc_is_as_wide_as_hanley_and_mcneil_s() -> None:
    """Radiology 143 (1982), the standard error of an AUROC; here 1.96 of them to either side."""
    labels = np.arange(600) % 2
    logits = np.random.default_rng(0).normal(1.5 * labels, 1.0)
    metrics = validation_metrics(logits.tolist(), labels.tolist(), Calibration())
    a, n = metrics["auroc"], 300
    q1, q2 = a / (2 - a), 2 * a**2 / (1 + a)
    error = ((a * (1 - a) + (n - 1) * (q1 + q2 - 2 * a**2)) / n**2) ** 0.5
    low, high = metrics["auroc_ci95"]
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.12)


def test_the_validation_loss_is_the_mean_negative_log_likelihood() -> None:
    """A logit that is not finite is the worst loss after calibration."""
    probabilities = np.array([0.9, 0.2, 0.4])
    logits = np.log(probabilities / (1 - probabilities))
    expected = -np.log([0.9, 1 - 0.2, 0.4]).mean()
    assert validation_loss(logits, [1, 0, 1]) == pytest.approx(expected, abs=1e-6)
    assert validation_loss([1000.0, -1000.0], [0, 1]) == 1000.0
    for broken in (float("nan"), float("inf")):
        assert calibrated_loss([1.0, -1.0, broken, 0.5], [1, 0, 1, 0]) == float("inf")


def test_a_loss_after_calibration_asks_neither_how_sure_logits_are_nor_where_they_turn() -> None:
    logits, labels = sample(0.0)
    x = np.array(logits)
    loss = calibrated_loss(logits, labels)
    assert calibrated_loss((5 * x - 3).tolist(), labels) == pytest.approx(loss, rel=1e-4)
    assert validation_loss((5 * x - 3).tolist(), labels) > 1.5 * loss
    assert loss <= validation_loss(logits, labels) + 1e-4
    noise = np.random.default_rng(1).normal(size=len(labels)).tolist()
    assert loss < calibrated_loss(noise, labels) == pytest.approx(np.log(2), abs=0.001)


def test_resamples_of_many_rows_are_drawn_a_few_at_a_time(monkeypatch: MonkeyPatch) -> None:
    logits, labels = sample(0.0)
    fitted = calibrate(logits, labels)
    at_once = validation_metrics(logits, labels, fitted)
    monkeypatch.setattr(validation, "MOST_RESAMPLED", 10 * len(labels))
    auroc = validation._auroc
    drawn: list[int] = []

    def counted(violating: np.ndarray, allowed: np.ndarray, axis: int = -1) -> np.ndarray:
        if violating.ndim > 1:
            drawn.append(len(violating))
        return auroc(violating, allowed, axis)

    monkeypatch.setattr(validation, "_auroc", counted)
    in_parts = validation_metrics(logits, labels, fitted)
    assert in_parts.pop("auroc_ci95") == pytest.approx(at_once.pop("auroc_ci95"), abs=0.002)
    assert in_parts == at_once
    assert max(drawn) == 10 and sum(drawn) >= validation.RESAMPLES
