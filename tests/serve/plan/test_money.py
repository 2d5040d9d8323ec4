"""Prices by hand."""

from __future__ import annotations

import pytest

from serve.plan.money import judge_prices, per_million_checks
from serve.plan.plan_file import JudgePricing


def test_devices_by_the_hour() -> None:
    # 3 devices at 2 USD answer 50 checks a second: 180,000 an hour for 6 USD.
    assert per_million_checks(2.0, 3, 50.0) == pytest.approx(6 / 180_000 * 1e6)


def test_a_judge_by_the_token() -> None:
    judge = JudgePricing(
        input=0.4,
        cached_input=0.1,
        output=1.6,
        policy_tokens=150,
        scaffold_tokens=50,
        output_tokens=5,
    )
    prices = judge_prices(judge, tokens=1000, rules=10)
    # A million checks: each token at a price a million costs that price.
    answers = 10 * 5 * 1.6
    assert prices.a_prompt_a_rule == pytest.approx(10 * 1200 * 0.4 + answers)
    first, again = 1050 * 0.4, 9 * 1050 * 0.1
    assert prices.conversation_first == pytest.approx(first + again + 10 * 150 * 0.4 + answers)
    assert prices.one_prompt == pytest.approx((1050 + 1500) * 0.4 + answers)


def test_without_a_price_of_cached_tokens_that_way_has_none() -> None:
    judge = JudgePricing(input=0.4, output=1.6)
    assert judge_prices(judge, 100, 2).conversation_first is None
