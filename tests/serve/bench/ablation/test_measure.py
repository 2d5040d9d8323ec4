"""The drivers of the ablation, on the shared engine: a fan-out, one by one, and a fleet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve.bench.ablation.ablations import FAN_OUT, FLEET, FULL_ENGINE, Ablation
from serve.bench.ablation.measure import AblationDriver
from tests.serve.cards import recipe
from tests.serve.guarded import guard_engine

pytestmark = pytest.mark.slow

NAMES = ["medical_advice", "pii_leak"]
SMALL_FAN_OUT = replace(FAN_OUT, tokens=150, adapters=2)
SMALL_FLEET = replace(FLEET, tokens=100, adapters=2, requests=6)
TITLES = recipe().model_copy(update={"rule_turn": "title"})


def test_rules_one_after_the_other_get_the_same_verdicts_later() -> None:
    samples = []
    for ablation in (Ablation(FULL_ENGINE), Ablation("one by one", one_by_one=True)):
        driver = AblationDriver(guard_engine(), TITLES, SMALL_FAN_OUT, ablation, NAMES)
        samples.append(driver.fan_out(seed=3, run=1))
    together, one_by_one = samples
    assert max(abs(a - b) for a, b in zip(together.logits, one_by_one.logits, strict=True)) < 1e-3
    assert one_by_one.latencies_ms[0] < one_by_one.latencies_ms[1] <= one_by_one.wall_ms
    assert together.lower_bound_ms > 0 and 0 < together.engine_ms <= together.wall_ms


def test_a_fleet_puts_a_conversation_to_one_rule_each() -> None:
    driver = AblationDriver(guard_engine(), TITLES, SMALL_FLEET, Ablation(FULL_ENGINE), NAMES)
    sample = driver.fleet(seed=5, alpha=1.0)
    assert len(sample.logits) == len(sample.latencies_ms) == 6
    assert sample.computed_tokens > 6 * 50 and sample.lower_bound_ms > 0
