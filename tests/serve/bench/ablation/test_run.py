"""The ablation on real engines, small.

What is switched off is off, and the numbers are those of the engine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from guard.errors import GuardError
from serve.bench.ablation.ablations import (
    ABLATIONS,
    FAN_OUT,
    FLEET,
    FULL_ENGINE,
    NO_SHARED_BLOCKS,
    NO_SHARED_PARTIAL_BLOCK,
    WAVES,
    Ablation,
)
from serve.bench.ablation.measure import AblationSample
from serve.bench.ablation.report import AblationReport, AblationRow, draw, table
from serve.bench.ablation.run import AblatedEngine, difference, run
from tests.serve.bench.small_engine import small_recipe
from tests.serve.cards import recipe

pytestmark = pytest.mark.slow

TOKENS, RULES = 150, 4
SMALL_FAN_OUT = replace(FAN_OUT, tokens=TOKENS, adapters=RULES, slots=RULES, runs=2)
SMALL_WAVES = replace(WAVES, tokens=TOKENS, adapters=RULES, slots=2, runs=2)
SMALL_FLEET = replace(
    FLEET, tokens=100, adapters=12, slots=2, in_host_memory=4, requests=24, runs=1
)
NO_PARTIAL = Ablation("no partial blocks", engine=NO_SHARED_PARTIAL_BLOCK)
TITLE = Ablation("title", rule_turn="title")


@pytest.fixture(scope="module")
def report() -> AblationReport:
    fan_out = (ABLATIONS[FAN_OUT][0], NO_SHARED_BLOCKS, NO_PARTIAL, TITLE)
    ablations = {
        SMALL_FAN_OUT: fan_out,
        SMALL_WAVES: ABLATIONS[WAVES][:2],
        SMALL_FLEET: ABLATIONS[FLEET][:2],
    }
    return run(small_recipe(), ablations, rounds=1, shares_process=True)


def rows(report: AblationReport, name: str) -> dict[str, AblationRow]:
    (traffic,) = (traffic for traffic in report.traffics if traffic.traffic == name)
    return {row.ablation: row for row in traffic.rows}


def test_what_is_switched_off_is_off(report: AblationReport) -> None:
    computed = {name: row.computed_tokens for name, row in rows(report, "fan-out").items()}
    unshared = computed[NO_SHARED_BLOCKS.name]
    assert computed[FULL_ENGINE] < computed[NO_PARTIAL.name] < unshared
    assert unshared > 0.9 * TOKENS * RULES
    assert computed[TITLE.name] > computed[FULL_ENGINE] + 10 * RULES


def test_what_is_in_slots_comes_first_only_where_that_is_on(report: AblationReport) -> None:
    full, fcfs = rows(report, "waves").values()
    assert full.swap_ins == RULES - 2  # two of four are there
    assert fcfs.swap_ins > full.swap_ins


def test_a_fleet_reads_adapters_from_disk(report: AblationReport) -> None:
    for row in rows(report, "fleet").values():
        assert 0 < row.adapter_loads <= row.swap_ins


def test_every_engine_is_timed_and_gives_the_same_verdicts(report: AblationReport) -> None:
    assert [traffic.runs for traffic in report.traffics] == [2, 2, 1]
    for traffic in report.traffics:
        for row in traffic.rows:
            assert 0 < row.engine_ms <= row.wall_ms.max
            assert row.lower_bound_ms > 0 and 0 < row.p95_ms <= row.wall_ms.max
            assert 100 < row.peak_memory_mib <= report.peak_memory_mib
            if row.ablation == TITLE.name:
                assert row.difference_nats is None
            else:
                assert row.difference_nats is not None and 0 <= row.difference_nats < 1e-3
    assert {row.swap_ins for row in rows(report, "fan-out").values()} == {0}
    line = next(line for line in table(report).splitlines() if line.startswith(FULL_ENGINE))
    assert line.endswith("1.00x")


def ablated(ablation: Ablation, *logits: float) -> AblatedEngine:
    sample = AblationSample(1, 1, 1, 1, 0, 0, (1.0,), logits, 1)
    return AblatedEngine(FAN_OUT, ablation, recipe(), {0: [sample]})


def test_other_verdicts_are_an_error() -> None:
    full = ablated(ABLATIONS[FAN_OUT][0], 0.5, -1.0)
    one_by_one = ABLATIONS[FAN_OUT][1]
    near, far = ablated(one_by_one, 0.5, -1.001), ablated(one_by_one, 0.5, -1.1)
    assert difference(near, full) == pytest.approx(0.001)
    with pytest.raises(GuardError, match=r"fan-out, not compiled: two engines disagree"):
        difference(far, full)


def test_the_report_is_kept_and_drawn(report: AblationReport, tmp_path: Path) -> None:
    path = tmp_path / "new" / "ablation.json"
    report.save(path)
    assert AblationReport.load(path) == report
    draw(report, path.with_suffix(".png"))
    with Image.open(path.with_suffix(".png")) as image:
        assert image.size[0] > 500
