"""Probabilities, threshold and uncertainty band against answers known in advance; and verdicts: no
number may read as "allow" by accident.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.calibrate import calibrate
from guard.calibration_rows import OWN_ROWS, for_calibration
from guard.conversation.example import GENERATOR, Example
from guard.errors import GuardError
from guard.verdict import Calibration, expected_calibration_error
from train.calibration.validation import validation_metrics


def sample(shift: float, n: int = 2_000) -> tuple[list[float], list[int]]:
    """Logits that are three times too sure and off by `shift`, and labels."""
    rng = np.random.default_rng(0)
    honest = rng.normal(0, 2, n)
    labels = (rng.random(n) < 1 / (1 + np.exp(-honest))).astype(int)
    return list(3 * (honest + shift)), labels.tolist()


def test_a_shift_of_all_logits_is_taken_back_by_a_bias_and_without_one_there_is_none() -> None:
    shifted = calibrate(*sample(1.5))
    assert shifted.temperature == pytest.approx(3.0, rel=0.1)
    assert shifted.bias == pytest.approx(-1.5, abs=0.15)
    logits, labels = sample(0.0)
    assert abs(calibrate(logits, labels).bias) < 0.1
    hundreds = [slice(start, start + 100) for start in range(0, 500, 100)]
    few = [calibrate(logits[rows], labels[rows]).bias for rows in hundreds]
    assert few.count(0.0) > len(few) / 2  # of a hundred rows a bias would mostly follow noise


def shares(calibration: Calibration, logits: list[float], labels: list[int]) -> tuple[float, float]:
    """Recall and false-positive rate."""
    flagged = np.array([calibration.verdict("toy", logit).violates for logit in logits])
    violating = np.array(labels) == 1
    return float(flagged[violating].mean()), float(flagged[~violating].mean())


def test_no_more_allowed_conversations_are_flagged_than_the_rule_says() -> None:
    logits, labels = sample(0.7)
    recalls = []
    for max_fpr in (0.01, 0.05, 0.1, 0.3):
        recall, rate = shares(calibrate(logits, labels, max_fpr), logits, labels)
        assert max_fpr - 5 / len(labels) <= rate <= max_fpr
        recalls.append(recall)
    assert recalls == sorted(recalls) and recalls[0] < recalls[-1]
    # A limit that finds nothing is kept to.
    logits, labels = [float(logit) for logit in range(40)], [1] * 20 + [0] * 20
    assert shares(calibrate(logits, labels, 0.1), logits, labels) == (0.0, 0.1)


@pytest.mark.parametrize("max_fpr", [0.05, 0.5])
def test_false_positives_that_find_no_violation_are_not_taken(max_fpr: float) -> None:
    allowed, violating = [-5.0, -4.0, -3.0, -2.0] * 10, [2.0, 3.0, 4.0, 5.0] * 10
    calibration = calibrate(allowed + violating, [0] * 40 + [1] * 40, max_fpr)
    assert calibration.threshold == pytest.approx(calibration.p_violation(0.0))


def test_few_verdicts_outside_the_uncertainty_band_are_wrong_and_equal_logits_are_alike() -> None:
    logits, labels = sample(0.0)
    calibration = calibrate(logits, labels)
    metrics = validation_metrics(logits, labels, calibration)
    recall, rate = shares(calibration, logits, labels)
    assert metrics["recall"] == pytest.approx(recall, abs=1e-4)
    assert metrics["false_positive_rate"] == pytest.approx(rate, abs=1e-4)
    assert metrics["accuracy"] < 0.85
    assert 0.94 < metrics["accuracy_where_confident"] < 0.96
    assert 0.2 < metrics["confident"] < 0.9
    right = calibrate([-4.0] * 50 + [4.0] * 50, [0] * 50 + [1] * 50)
    assert all(right.verdict("toy", logit).confident for logit in (-4.0, -0.1, 0.0, 0.1, 4.0))
    guessed = np.random.default_rng(0).normal(0, 1, 400).tolist()
    guess = calibrate(guessed, [0, 1] * 200)
    assert not any(guess.verdict("toy", logit).confident for logit in (-9.0, 0.0, 9.0))
    logits = [-3.0] * 10 + [3.0] * 10 + [-2.0] * 29 + [2.0] * 29
    labels = [0] * 8 + [1] * 2 + [1] * 10 + [0] * 29 + [1] * 29
    calibration = calibrate(logits, labels)
    assert len({calibration.verdict("toy", logit).confident for logit in (-2.0, 2.0)}) == 1
    metrics = validation_metrics(logits, labels, calibration)
    assert metrics["accuracy_where_confident"] == pytest.approx(0.9744, abs=1e-4)


def test_the_cut_nearest_to_neutral_wins_unless_another_is_better_by_more_than_noise() -> None:
    separated = calibrate([-4.0, -3.0, 3.0, 4.0], [0, 0, 1, 1])
    assert 0.5 < separated.temperature < 10 and separated.threshold == 0.5
    for logits, nearest in (([-3.0, -1.0, 2.0, 4.0], -2.0), ([-4.0, -2.0, 1.0, 3.0], 2.0)):
        calibration = calibrate(logits, [0, 1, 0, 1])  # the outer cuts both get 3 of 4 right
        assert calibration.threshold == pytest.approx(calibration.p_violation(nearest))
    allowed, violating = [-3.0] * 95 + [6.0] * 5, [3.0] * 95 + [-0.5] + [-6.0] * 4
    labels = [0] * 100 + [1] * 100
    # A cut at -1.75 is right once more.
    assert calibrate(allowed + violating, labels).threshold == 0.5
    shifted = calibrate([logit + 4 for logit in allowed + violating], labels)
    violates = [shifted.verdict("toy", logit).violates for logit in (1.0, 3.5, 7.0)]
    assert violates == [False, False, True]
    calibration = calibrate([-3.0] * 90 + [-1.0] * 10, [0] * 95 + [1] * 5)
    # 5 false alarms for all 5 violations; plain accuracy would say never.
    assert calibration.verdict("toy", -1.0).violates


def test_no_more_twins_are_flagged_than_the_rule_says_whatever_else_bounds_the_threshold() -> None:
    logits, labels = sample(0.0)
    allowed = [logit for logit, label in zip(logits, labels, strict=True) if not label]
    twins = sorted(allowed)[-len(allowed) // 4 :]  # the hardest quarter

    def flagged(max_fpr: float | None, of_twins: float | None) -> tuple[float, float]:
        calibration = calibrate(logits, labels, max_fpr, twins=twins, max_fpr_twins=of_twins)
        hits = [calibration.verdict("toy", logit).violates for logit in twins]
        return shares(calibration, logits, labels)[1], sum(hits) / len(hits)

    balanced, of_twins = flagged(None, None)
    assert of_twins > 0.5 and flagged(None, 0.99) == (balanced, of_twins)
    for max_fpr in (None, 0.2):
        assert 0.09 < flagged(max_fpr, 0.1)[1] <= 0.1
    assert flagged(0.01, 0.1) == flagged(0.01, None)  # the stricter one decides


def test_a_twin_that_is_no_row_of_the_threshold_s_is_kept_too() -> None:
    """Of generated and own rows own ones choose the threshold, and all twins bound it."""
    logits, labels = [-2.0] * 20 + [2.0] * 20, [0] * 20 + [1] * 20
    for harmless in (0.5, 1.9, 2.1, 9.0):
        twins = [-3.0] * 19 + [harmless] * 2
        with pytest.raises(GuardError, match=r"too few validation twins.*10 rows.*least 20"):
            calibrate(logits, labels, twins=twins[-10:], max_fpr_twins=0.05)
        calibration = calibrate(logits, labels, twins=twins, max_fpr_twins=0.05)
        assert not calibration.verdict("toy", harmless).violates
        assert calibration.verdict("toy", 2.0).violates == (harmless < 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_or_rows_that_no_threshold_follows_from_are_refused(bad: float) -> None:
    with pytest.raises(GuardError, match=r"not finite.*1 of 4.*learning rate"):
        calibrate([0.1, bad, 0.2, 0.3], [0, 1, 0, 1])
    with pytest.raises(GuardError, match=r"too few allowed.*20 rows, max_fpr 0.01.*at least 100"):
        calibrate([-1.0] * 20 + [1.0] * 20, [0] * 20 + [1] * 20, 0.01)


def test_a_threshold_is_for_one_s_own_rows_where_there_are_enough_of_them() -> None:
    labels = [0, 1] * OWN_ROWS + [0] * 3
    own = list(range(1, 2 * OWN_ROWS + 1))  # as many of either label
    is_generated = [index not in own for index in range(len(labels))]
    logits = [float(index) for index in range(len(labels))]
    of_own = [logits[index] for index in own], [labels[index] for index in own]

    def chosen(generated: list[bool], max_fpr: float | None = None) -> object:
        sources = [GENERATOR if is_generated else "own" for is_generated in generated]
        pairs = zip(labels, sources, strict=True)
        rows = [Example("e", "toy", (), label, "test", source, "g") for label, source in pairs]
        return for_calibration(logits, rows, max_fpr)

    assert chosen(is_generated) == chosen(is_generated, 1 / OWN_ROWS) == of_own
    assert chosen(is_generated, 0.9 / OWN_ROWS) == (logits, labels)
    for nothing_mixed in (False, True):
        assert chosen([nothing_mixed] * len(labels)) == (logits, labels)
    for missing in (1, 2):
        fewer = [generated or index == missing for index, generated in enumerate(is_generated)]
        assert chosen(fewer) == (logits, labels)


logits = st.floats(allow_nan=False, allow_infinity=True)
temperatures = st.floats(min_value=1e-6, max_value=1e6)


def test_a_probability_at_the_threshold_violates_and_nan_is_no_verdict() -> None:
    assert Calibration(temperature=2.0).p_violation(math.log(9) * 2) == pytest.approx(0.9)
    with pytest.raises(ValueError, match="NaN"):
        Calibration().verdict("pii_leak", math.nan)
    for logit, violates in ((0.1, True), (0.0, True), (-0.1, False)):
        verdict = Calibration(threshold=0.5).verdict("pii_leak", logit)
        assert verdict.violates is violates
        assert (verdict.rule, verdict.logit, verdict.threshold) == ("pii_leak", logit, 0.5)


@pytest.mark.parametrize(
    ("temperature", "threshold", "bias"),
    [
        *((temperature, 0.5, 0.0) for temperature in (0.0, -1.0, math.nan, math.inf)),
        *((1.0, threshold, 0.0) for threshold in (math.nan, -0.1, 1.1, math.inf)),
        (1.0, 0.5, math.nan),
    ],
)
def test_a_calibration_that_would_always_or_never_allow_is_refused(
    temperature: float, threshold: float, bias: float
) -> None:
    with pytest.raises(ValueError, match="must be"):
        Calibration(temperature, threshold, bias)


@given(logits, logits, temperatures)
def test_a_higher_logit_is_never_a_lower_probability(
    one: float, other: float, temperature: float
) -> None:
    """Nor do extreme ones overflow or turn around."""
    calibration = Calibration(temperature)
    low, high = sorted((one, other))
    assert 0.0 <= calibration.p_violation(low) <= calibration.p_violation(high) <= 1.0
    assert calibration.p_violation(math.inf) == pytest.approx(1.0)
    assert calibration.p_violation(-math.inf) == pytest.approx(0.0, abs=1e-20)


def test_ece_by_hand_and_in_fifteen_equal_bins_of_which_the_last_is_closed() -> None:
    by_hand = expected_calibration_error([1, 0, 0, 0], [0.9, 0.9, 0.1, 0.1])
    assert by_hand == pytest.approx(0.5 * 0.4 + 0.5 * 0.1)
    edge = 1 / 15
    below, above = edge - 1e-6, edge + 1e-6
    # Opposite gaps of the same size cancel only within one bin.
    apart = expected_calibration_error([1, 0], [below, above])
    assert apart == pytest.approx((1 - below + above) / 2)
    together = expected_calibration_error([1, 0], [above, above])
    assert together == pytest.approx(0.5 - above)
    assert expected_calibration_error([1], [1.0]) == 0.0
    assert expected_calibration_error([], []) is None
