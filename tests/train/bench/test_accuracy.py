"""The comparison of both ways to train an aLoRA: two real adapters, answered in plain PEFT."""

from __future__ import annotations

import pytest

from tests.train.conftest import MakeJob, data
from train.bench.accuracy import compare, table

pytestmark = pytest.mark.slow


def test_both_ways_train_the_same_adapter_and_the_table_says_so(make_job: MakeJob) -> None:
    job = make_job("alora", max_steps=12, learning_rate=3e-3)
    comparison = compare(job, data(job))
    trl, cached = comparison.accuracy
    assert trl == cached and comparison.flips == 0
    assert abs(comparison.auroc[0] - comparison.auroc[1]) < 0.02
    assert 0 < comparison.largest_difference < 0.02 * comparison.largest_logit
    assert min(comparison.seconds) > 0
    text = table([comparison])
    assert f"| 0 | {100 * trl:.2f} / {100 * cached:.2f} |" in text
