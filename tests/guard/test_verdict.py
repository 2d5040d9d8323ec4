"""Logits to verdicts: no number may read as "allow" by accident."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.verdict import Calibration, expected_calibration_error

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
