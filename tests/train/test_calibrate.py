"""Temperature, threshold and intervals against answers known in advance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from guard.errors import GuardError
from guard.verdict import Calibration
from train.calibrate import calibrate, validation_metrics


def test_the_temperature_undoes_a_known_overconfidence() -> None:
    rng = np.random.default_rng(0)
    honest = rng.normal(0, 2, 20_000)
    labels = (rng.random(20_000) < 1 / (1 + np.exp(-honest))).astype(int)
    assert calibrate(list(honest * 3), labels.tolist()).temperature == pytest.approx(3.0, rel=0.05)


def test_perfectly_separated_logits_get_a_finite_temperature_and_the_neutral_threshold() -> None:
    calibration = calibrate([-4.0, -3.0, 3.0, 4.0], [0, 0, 1, 1])
    assert 0.5 < calibration.temperature < 10
    assert calibration.threshold == 0.5


def test_the_threshold_takes_up_a_shift_of_all_logits() -> None:
    calibration = calibrate([1.0, 2.0, 5.0, 6.0], [0, 0, 1, 1])
    assert [calibration.verdict("toy", logit).violates for logit in (1.0, 2.0, 5.0, 6.0)] == [False, False, True, True]
    assert calibration.threshold == pytest.approx(calibration.p_violation(3.5))


def test_among_equally_good_cuts_the_one_nearest_to_neutral_wins() -> None:
    for logits, nearest in (([-3.0, -1.0, 2.0, 4.0], -2.0), ([-4.0, -2.0, 1.0, 3.0], 2.0)):
        calibration = calibrate(logits, [0, 1, 0, 1])  # the lowest and the highest cut both get 3 of 4 right
        assert calibration.threshold == pytest.approx(calibration.p_violation(nearest))


def test_a_gain_within_the_noise_of_the_validation_split_moves_no_threshold() -> None:
    allowed, violating = [-3.0] * 95 + [6.0] * 5, [3.0] * 95 + [-0.5] + [-6.0] * 4
    labels = [0] * 100 + [1] * 100
    assert calibrate(allowed + violating, labels).threshold == 0.5  # a cut at -1.75 is right once more
    assert calibrate([logit + 4 for logit in allowed + violating], labels).threshold > 0.5


def test_a_rare_violation_is_not_ignored() -> None:
    logits = [-3.0] * 90 + [-1.0] * 5 + [-1.0] * 5
    labels = [0] * 90 + [0] * 5 + [1] * 5
    calibration = calibrate(logits, labels)
    assert calibration.verdict("toy", -1.0).violates  # 5 false alarms for all 5 violations; plain accuracy would say never


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_diverged_training_is_an_error_with_a_remedy(bad: float) -> None:
    with pytest.raises(GuardError, match=r"not finite.*1 of 4.*learning rate"):
        calibrate([0.1, bad, 0.2, 0.3], [0, 1, 0, 1])


def test_metrics_of_a_hand_made_split() -> None:
    metrics = validation_metrics([-2.0, 1.0, 2.0, 3.0], [0, 0, 1, 1], Calibration())
    assert metrics["n"] == 4
    assert metrics["accuracy"] == 0.75
    assert metrics["accuracy_ci95"] == [0.3006, 0.9544]  # Wilson's interval for 3 of 4
    assert metrics["balanced_accuracy"] == 0.75
    assert metrics["f1"] == 0.8
    assert metrics["auroc"] == 1.0
    assert metrics["nll"] == pytest.approx(0.4039, abs=1e-4)


def test_the_interval_of_the_auroc_holds_the_auroc_and_narrows_with_more_examples() -> None:
    rng = np.random.default_rng(1)
    widths = []
    for n in (50, 500):
        labels = np.arange(n) % 2
        logits = rng.normal(labels, 1.0).round(1)  # with ties
        metrics = validation_metrics(logits.tolist(), labels.tolist(), Calibration())
        assert metrics["auroc"] == pytest.approx(roc_auc_score(labels, logits), abs=1e-4)
        low, high = metrics["auroc_ci95"]
        assert low < metrics["auroc"] < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2
