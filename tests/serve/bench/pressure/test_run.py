"""The pressure benchmark on real engines, small.

No conversation is computed twice, and the numbers are those of the traffic.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.bench.pressure.measure import ROUNDS
from serve.bench.pressure.report import PressureReport
from serve.bench.pressure.run import run
from serve.bench.pressure.work import PressureEngine, PressureWork
from serve.bench.workload.prompts import conversation, random_rule_text
from tests.serve.bench.small_engine import small_recipe
from tests.serve.cards import prompts, recipe

pytestmark = pytest.mark.slow

CONVERSATIONS, TOKENS, RULES, SLOTS = 8, 400, 5, 2
WORK = PressureWork(CONVERSATIONS, TOKENS, RULES, few_slots=SLOTS)
ENGINES = [
    PressureEngine(RULES, "cache-aware", 0.5),
    PressureEngine(RULES, "cache-aware", 4.0),
    PressureEngine(SLOTS, "cache-aware", 4.0),
    PressureEngine(RULES, "FCFS", 4.0),
]
SUFFIX = len(prompts().suffix_ids(random_rule_text(recipe())))
STEP_TOKENS = TOKENS // 4  # a turn of the fair queue is not much longer than a conversation


@pytest.fixture(scope="module")
def report() -> PressureReport:
    small = small_recipe(max_num_batched_tokens=STEP_TOKENS, max_num_seqs=64)
    return run(small, repeats=1, work=WORK, engines=ENGINES)


def test_the_caches_have_the_sizes_that_are_stated(report: PressureReport) -> None:
    expected = []
    for engine in ENGINES:
        expected += [(name, engine.slots, engine.order, engine.demand) for name in ROUNDS]
    assert [(row.round, row.slots, row.order, row.demand) for row in report.rows] == expected
    for row in report.rows:
        assert row.cache_tokens == pytest.approx(CONVERSATIONS * TOKENS / row.demand, abs=2 * 32)


def test_no_conversation_is_computed_twice_however_small_the_cache(report: PressureReport) -> None:
    for row in (row for row in report.rows if row.round == "new"):
        assert row.needed_tokens == pytest.approx(
            CONVERSATIONS * (TOKENS + RULES * SUFFIX), rel=0.05
        )
        assert (
            row.needed_tokens - CONVERSATIONS * 64 <= row.computed_tokens <= row.needed_tokens
        )  # all begin with the same block
        assert row.verdicts_per_second.median > 0
        assert 0 < row.p50_ms <= row.p95_ms


def test_what_comes_again_is_computed_anew_only_where_the_cache_does_not_hold_everything(
    report: PressureReport,
) -> None:
    for row in (row for row in report.rows if row.round == "again"):
        assert row.needed_tokens == pytest.approx(
            CONVERSATIONS * (report.new_tokens + RULES * SUFFIX), abs=CONVERSATIONS
        )
        turn = conversation(prompts(), WORK.turn_tokens, 7)
        assert report.new_tokens == pytest.approx(
            sum(len(prompts().turn_ids(message)) for message in turn), abs=6
        )
        if row.demand < 1:
            assert row.computed_tokens <= row.needed_tokens
        if row.demand > 1:
            assert row.computed_tokens > 2 * row.needed_tokens


def test_of_those_that_come_again_the_ones_that_the_cache_holds_are_served_before_they_leave_it(
    report: PressureReport,
) -> None:
    assert (
        WORK.turn_tokens - 40 < report.new_tokens < WORK.turn_tokens
    )  # what all begin with is not new
    again = {
        (row.order, row.demand): row
        for row in report.rows
        if row.round == "again" and row.slots == RULES
    }
    saved = again["FCFS", 4.0].computed_tokens - again["cache-aware", 4.0].computed_tokens
    held = CONVERSATIONS * TOKENS / 4.0
    assert saved > 0.3 * held  # where there is more, they grow into one another


def test_fewer_slots_than_rules_bring_adapters_again_and_again(report: PressureReport) -> None:
    for row in report.rows:
        assert row.swap_ins >= RULES - SLOTS if row.slots < RULES else row.swap_ins == 0
    assert report.rows[0].adapter_mib > 0.1 and report.peak_memory_mib > 100


def test_the_report_is_kept(report: PressureReport, tmp_path: Path) -> None:
    path = tmp_path / "new" / "pressure.json"
    report.save(path)
    assert PressureReport.load(path) == report
