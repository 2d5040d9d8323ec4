"""The pressure benchmark on real engines, small: no conversation is computed twice, and the numbers are those of the traffic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from guard.files.yaml_file import validate
from serve.bench import pressure as pressure_bench
from serve.bench.pressure import DEMANDS, ROUNDS, TURN_TOKENS, PressureReport, draw, run, table
from serve.bench.workload import conversation, told
from serve.engine.decoder import DecoderBackend
from tests.serve.guarded import prompts, recipe

CONVERSATIONS, TOKENS, RULES, SLOTS = 8, 400, 5, 2
SUFFIX = len(prompts().suffix_ids(told(recipe())))


@pytest.fixture(scope="module")
def report() -> PressureReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pressure_bench, "FEW_SLOTS", SLOTS)
        patch.setattr(
            DecoderBackend, "step_tokens", TOKENS // 4
        )  # a turn is not much longer than a conversation
        return run(recipe(), repeats=1, conversations=CONVERSATIONS, tokens=TOKENS, rules=RULES)


def test_the_caches_have_the_sizes_that_are_stated(report: PressureReport) -> None:
    kinds = ((RULES, True), (SLOTS, True), (RULES, False))
    expected = [(name, *kind, demand) for kind in kinds for demand in DEMANDS for name in ROUNDS]
    assert [
        (row.round, row.slots, row.resident_first, row.demand) for row in report.rows
    ] == expected
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
        assert row.verdicts_per_second_min <= row.verdicts_per_second <= row.verdicts_per_second_max
        assert 0 < row.p50_ms <= row.p95_ms


def test_a_conversation_that_comes_again_is_computed_anew_only_where_the_cache_does_not_hold_them_all(
    report: PressureReport,
) -> None:
    for row in (row for row in report.rows if row.round == "again"):
        assert row.needed_tokens == pytest.approx(
            CONVERSATIONS * (report.new_tokens + RULES * SUFFIX), abs=CONVERSATIONS
        )
        turn = conversation(prompts(), TURN_TOKENS, 7)
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
    assert TURN_TOKENS - 40 < report.new_tokens < TURN_TOKENS  # what all begin with is not new
    again = {
        (row.resident_first, row.demand): row
        for row in report.rows
        if row.round == "again" and row.slots == RULES
    }
    for demand in (2.0, 4.0):
        saved = again[False, demand].computed_tokens - again[True, demand].computed_tokens
        assert (
            saved > 0.3 * CONVERSATIONS * TOKENS / demand
        )  # of what the cache holds; where there is more, they grow into one another


def test_fewer_slots_than_rules_bring_adapters_again_and_again(report: PressureReport) -> None:
    for row in report.rows:
        assert row.swap_ins >= RULES - SLOTS if row.slots < RULES else row.swap_ins == 0
    assert report.rows[0].adapter_mib > 0.1 and report.peak_memory_mib > 100


def test_the_report_is_kept_and_drawn(report: PressureReport, tmp_path: Path) -> None:
    path = tmp_path / "new" / "pressure.json"
    report.save(path)
    assert validate(json.loads(path.read_text()), PressureReport, where=path) == report
    assert "4.0x" in table(report)
    draw(report, tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.size == (1050, 675)
