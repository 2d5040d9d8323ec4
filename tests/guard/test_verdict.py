"""Logits to verdicts: no number may read as "allow" by accident."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.verdict import Calibration, expected_calibration_error

logits = st.floats(allow_nan=False, allow_infinity=True)
temperatures = st.floats(min_value=1e-6, max_value=1e6)


def test_a_logit_of_zero_is_one_half_the_temperature_divides_and_nan_is_no_verdict() -> None:
    assert Calibration().p_violation(0.0) == 0.5
    assert Calibration(temperature=2.0).p_violation(math.log(9) * 2) == pytest.approx(0.9)
    with pytest.raises(ValueError, match="NaN"):
        Calibration().verdict("pii_leak", math.nan)


@pytest.mark.parametrize(
    ("logit", "p_violation"),
    [(math.inf, 1.0), (-math.inf, 0.0), (1e308, 1.0), (-1e308, 0.0), (800.0, 1.0)],
)
def test_extreme_logits_neither_overflow_nor_turn_around(logit: float, p_violation: float) -> None:
    assert Calibration(temperature=0.1).p_violation(logit) == pytest.approx(p_violation, abs=1e-20)


@pytest.mark.parametrize(
    ("temperature", "threshold"),
    [
        *((temperature, 0.5) for temperature in (0.0, -1.0, math.nan, math.inf)),
        *((1.0, threshold) for threshold in (math.nan, -0.1, 1.1, math.inf)),
    ],
)
def test_a_calibration_that_would_always_or_never_allow_is_refused(
    temperature: float, threshold: float
) -> None:
    with pytest.raises(ValueError, match="must be"):
        Calibration(temperature, threshold)


@pytest.mark.parametrize(("logit", "violates"), [(0.1, True), (0.0, True), (-0.1, False)])
def test_a_probability_at_the_threshold_violates(logit: float, violates: bool) -> None:
    verdict = Calibration(threshold=0.5).verdict("pii_leak", logit)
    assert verdict.violates is violates
    assert (verdict.rule, verdict.logit, verdict.threshold) == ("pii_leak", logit, 0.5)


@given(logits, logits, temperatures)
def test_a_higher_logit_is_never_a_lower_probability(
    one: float, other: float, temperature: float
) -> None:
    calibration = Calibration(temperature)
    low, high = sorted((one, other))
    assert 0.0 <= calibration.p_violation(low) <= calibration.p_violation(high) <= 1.0


def test_ece_by_hand_and_in_fifteen_equal_bins_of_which_the_last_is_closed() -> None:
    assert expected_calibration_error([1, 0, 0, 0], [0.9, 0.9, 0.1, 0.1]) == pytest.approx(
        0.5 * 0.4 + 0.5 * 0.1
    )
    edge = 1 / 15
    just_below, just_above = edge - 1e-6, edge + 1e-6
    # opposite gaps of the same size cancel only within one bin
    apart = expected_calibration_error([1, 0], [just_below, just_above])
    together = expected_calibration_error([1, 0], [just_above, just_above])
    assert apart == pytest.approx((1 - just_below + just_above) / 2)
    assert together == pytest.approx(0.5 - just_above)
    assert expected_calibration_error([1], [1.0]) == 0.0
    assert expected_calibration_error([], []) is None
