"""The load benchmark on a real engine, small: both methods get the same traffic, and one that cannot keep up is not asked more."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from guard.files.yaml_file import validate
from serve.bench.load import LENGTHS, RULES, LoadReport, Run, arrivals, draw, run, table
from serve.bench.traffic import Timed
from tests.serve.guarded import prompts, recipe

CHECKS = 12


@pytest.fixture(scope="module")
def report() -> LoadReport:
    return run(recipe(), rates=(1000.0, 2000.0), checks=CHECKS, repeats=2)


def test_conversations_have_real_lengths_and_a_few_rules_each() -> None:
    asked = arrivals(prompts(), 5.0, 200, seed=3)
    lengths = sorted(len(prompts().prefix_ids(arrival.messages)) for arrival in asked)
    assert lengths[0] >= LENGTHS[0] - 5 and lengths[-1] <= LENGTHS[-1] + 5
    assert np.median(lengths) == pytest.approx(LENGTHS[10], rel=0.1)
    assert {len(arrival.rules) for arrival in asked} == set(range(RULES[0], RULES[1] + 1))
    assert all(len(set(arrival.rules)) == len(arrival.rules) for arrival in asked)
    assert asked[-1].due_s == pytest.approx(40, rel=0.3)
    assert asked == arrivals(prompts(), 5.0, 200, seed=3) != arrivals(prompts(), 5.0, 200, seed=4)


def test_both_methods_get_the_same_traffic_and_an_alora_computes_a_fraction(
    report: LoadReport,
) -> None:
    lora, alora = report.rows
    assert (lora.method, alora.method) == ("lora", "alora")
    assert lora.offered_per_second == alora.offered_per_second and lora.verdicts == alora.verdicts
    assert 2 * RULES[0] * CHECKS <= alora.verdicts <= 2 * RULES[1] * CHECKS
    assert alora.computed_tokens < lora.computed_tokens / 3
    assert alora.computed_tokens <= alora.needed_tokens == lora.needed_tokens
    assert alora.swap_ins == 0
    assert 0 < alora.p50_ms <= alora.p95_ms <= alora.p99_ms


def test_what_does_not_keep_up_is_not_asked_at_higher_rates(report: LoadReport) -> None:
    assert [row.keeps_up for row in report.rows] == [
        False,
        False,
    ]  # a thousand a second; the second rate was left out
    assert "does not keep up" in table(report)


def test_a_server_keeps_up_whose_conversations_wait_no_longer_in_the_end_than_in_the_beginning() -> (
    None
):
    def waits(latencies_s: list[float]) -> float:
        return Run(1.0, Timed(1.0, tuple(latencies_s)), 1, 1, 1, 0).growth

    assert waits([1.0, 2.0, 1.5, 9.0, 1.0, 2.0, 1.5, 1.0, 2.0]) == 1.0
    assert waits([float(number) for number in range(1, 10)]) == 4.0
    assert waits([0.5]) == 1.0


def test_the_report_is_kept_and_drawn(report: LoadReport, tmp_path: Path) -> None:
    path = tmp_path / "new" / "load.json"
    report.save(path)
    assert validate(json.loads(path.read_text()), LoadReport, where=path) == report
    draw(report, path.with_suffix(".png"))
    with Image.open(path.with_suffix(".png")) as image:
        assert image.size[0] > 500
