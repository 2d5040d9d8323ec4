"""The comparison of both ways to train an aLoRA: two real adapters, answered in plain PEFT."""

from __future__ import annotations

from tests.train.conftest import MakeJob, data
from train.bench.accuracy import compare, table


def test_both_ways_train_the_same_adapter_and_the_table_says_so(make_job: MakeJob) -> None:
    job = make_job("alora", max_steps=12, learning_rate=3e-3)
    pair = compare(job, data(job))
    assert pair.accuracy[0] == pair.accuracy[1] and pair.flips == 0
    assert abs(pair.auroc[0] - pair.auroc[1]) < 0.02
    assert 0 < pair.largest_difference < 0.02 * pair.largest_logit
    assert min(pair.seconds) > 0
    text = table([pair])
    assert f"| 0 | {100 * pair.accuracy[0]:.2f} / {100 * pair.accuracy[1]:.2f} |" in text
