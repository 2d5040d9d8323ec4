"""The load benchmark on a real engine, small.

All methods get the same traffic, a saturated one no more.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from guard.example import Message
from serve.bench.load import LENGTHS, RULES, LoadReport, LoadRun, arrivals, draw, run, table
from serve.bench.workload.traffic import Timed
from tests.serve.bench.small_engine import small_recipe
from tests.serve.cards import prompts, recipe

pytestmark = pytest.mark.slow

CHECKS, REPEATS = 12, 1
FEW_RULES = (3, 5)  # with so few, a LoRA's conversation fits into a turn of the fair queue


@pytest.fixture(scope="module")
def report() -> LoadReport:
    # Short steps: a queue of so few conversations must be seen to grow on any machine.
    small = small_recipe(max_num_batched_tokens=512)
    return run(small, (1000.0, 2000.0), CHECKS, REPEATS, FEW_RULES)


def test_conversations_have_real_lengths_and_a_few_rules_each() -> None:
    drawn = arrivals(prompts(), 5.0, 200, seed=3)
    lengths = sorted(len(prompts().prefix_ids(arrival.messages)) for arrival in drawn)
    assert lengths[0] >= LENGTHS[0] - 5 and lengths[-1] <= LENGTHS[-1] + 5
    assert np.median(lengths) == pytest.approx(LENGTHS[10], rel=0.1)
    assert {len(arrival.rules) for arrival in drawn} == set(range(RULES[0], RULES[1] + 1))
    assert all(len(set(arrival.rules)) == len(arrival.rules) for arrival in drawn)
    assert drawn[-1].due_s == pytest.approx(40, rel=0.3)
    assert drawn == arrivals(prompts(), 5.0, 200, seed=3) != arrivals(prompts(), 5.0, 200, seed=4)


def test_no_two_runs_have_a_conversation_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(_: object, __: int, seed: int) -> tuple[Message, ...]:
        return (Message("user", f"conversation {seed}"),)

    monkeypatch.setattr("serve.bench.load.conversation", named)
    runs = [arrivals(prompts(), 5.0, 1200, seed) for seed in (0, 1, 2)]
    assert len({arrival.messages for run in runs for arrival in run}) == 3 * 1200


def test_both_methods_get_the_same_traffic_and_an_alora_computes_a_fraction(
    report: LoadReport,
) -> None:
    lora, alora = report.rows
    assert [lora.method, alora.method] == recipe().adapter_methods
    assert lora.offered_per_second == alora.offered_per_second and lora.verdicts == alora.verdicts
    least, most = FEW_RULES
    assert REPEATS * CHECKS * least <= alora.verdicts <= REPEATS * CHECKS * most
    assert alora.computed_tokens < lora.computed_tokens / 3
    assert alora.computed_tokens <= alora.needed_tokens == lora.needed_tokens
    assert alora.swap_ins == 0
    assert 0 < alora.p50_ms <= alora.p95_ms <= alora.p99_ms


def test_a_saturated_method_is_left_out_at_higher_rates(report: LoadReport) -> None:
    # A thousand a second; the second rate was left out.
    assert [row.is_saturated for row in report.rows] == [True, True]
    rate = report.rows[-1].answered_per_second
    assert f"saturated at {rate:.1f} requests/s" in table(report)


def test_growth_compares_the_waits_at_the_end_with_those_at_the_beginning() -> None:
    def growth(latencies_s: list[float]) -> float:
        return LoadRun(1.0, Timed(1.0, tuple(latencies_s)), 1, 1, 1, 0).growth

    assert growth([1.0, 2.0, 1.5, 9.0, 1.0, 2.0, 1.5, 1.0, 2.0]) == 1.0
    assert growth([float(number) for number in range(1, 10)]) == 4.0
    assert growth([0.5]) == 1.0


def test_the_report_is_kept_and_drawn(report: LoadReport, tmp_path: Path) -> None:
    path = tmp_path / "new" / "load.json"
    report.save(path)
    assert LoadReport.load(path) == report
    draw(report, path.with_suffix(".png"))
    with Image.open(path.with_suffix(".png")) as image:
        assert image.size[0] > 500
