"""The ablation on real engines, small: what is switched off is off, and the numbers are those of the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from guard.errors import GuardError
from guard.files.yaml_file import validate
from guard.layout import ROOT
from serve.bench.ablation.report import AblationReport, AblationRow, draw, table
from serve.bench.ablation.run import (
    EVERYTHING,
    FAN_OUT,
    FLEET,
    NO_TAILS,
    VARIANTS,
    WAVES,
    Sample,
    Variant,
    _difference,
    run,
)
from tests.serve.guarded import recipe

TOKENS, RULES = 150, 4
SMALL_FAN_OUT = replace(FAN_OUT, tokens=TOKENS, adapters=RULES, slots=RULES, runs=2)
SMALL_WAVES = replace(WAVES, tokens=TOKENS, adapters=RULES, slots=2, runs=2)
SMALL_FLEET = replace(
    FLEET, tokens=100, adapters=12, slots=2, in_host_memory=4, requests=24, runs=1
)
SMALL_RECIPE = recipe().model_copy(
    update={"engine": recipe().engine | {"kv_cache_memory_bytes": 2**26}}
)


@pytest.fixture(scope="module")
def report() -> AblationReport:
    unshared, vllms = (
        next(variant for variant in VARIANTS[FAN_OUT] if variant.name.startswith(name))
        for name in ("no blocks", "vLLM's")
    )
    fan_out = (
        VARIANTS[FAN_OUT][0],
        unshared,
        vllms,
        Variant("no tails", engine=NO_TAILS),
        Variant("title", rule_turn="title"),
    )
    return run(
        SMALL_RECIPE,
        {
            SMALL_FAN_OUT: fan_out,
            SMALL_WAVES: VARIANTS[WAVES][:2],
            SMALL_FLEET: VARIANTS[FLEET][::2],
        },
        rounds=1,
    )


def rows(report: AblationReport, traffic: str) -> dict[str, AblationRow]:
    (found,) = (each for each in report.traffics if each.traffic == traffic)
    return {row.variant: row for row in found.rows}


def test_what_is_switched_off_is_off(report: AblationReport) -> None:
    computed = {name: row.computed_tokens for name, row in rows(report, "fan-out").items()}
    assert (
        computed[EVERYTHING] < computed["no tails"] < computed["no blocks shared between adapters"]
    )
    assert computed["no blocks shared between adapters"] > 0.9 * TOKENS * RULES
    assert computed["title"] > computed[EVERYTHING] + 10 * RULES


def test_what_is_in_slots_comes_first_only_where_that_is_on(report: AblationReport) -> None:
    brought = {name: row.swap_ins for name, row in rows(report, "waves").items()}
    assert brought[EVERYTHING] == RULES - 2  # two of four are there
    assert brought["the rules in the order asked"] > brought[EVERYTHING]


def test_a_fleet_reads_adapters_from_disk(report: AblationReport) -> None:
    for row in rows(report, "fleet").values():
        assert 0 < row.adapter_loads <= row.swap_ins
        assert row.limit_ms < row.engine_ms


def test_every_engine_is_timed_and_says_the_same(report: AblationReport) -> None:
    assert [traffic.runs for traffic in report.traffics] == [2, 2, 1]
    for traffic in report.traffics:
        for row in traffic.rows:
            assert 0 < row.wall_ms_min <= row.wall_ms <= row.wall_ms_max
            assert (
                row.limit_ms > 0
                and 0 < row.p95_ms <= row.wall_ms_max
                and 0 < row.engine_ms <= row.wall_ms
            )
            assert 100 < row.peak_memory_mib <= report.peak_memory_mib
            assert (
                row.difference_nats is None
                if row.variant == "title"
                else 0 <= row.difference_nats < 1e-3
            )  # type: ignore[operator]
    assert {row.swap_ins for row in rows(report, "fan-out").values()} == {0}
    line = next(line for line in table(report).splitlines() if line.startswith(EVERYTHING))
    assert line.endswith("1.00")


def test_other_verdicts_are_an_error() -> None:
    def sample(*logits: float) -> list[Sample]:
        return [Sample(1, 1, 1, 1, 0, 0, (1.0,), logits, 1)]

    whole = sample(0.5, -1.0)
    assert _difference(
        recipe(), FAN_OUT, VARIANTS[FAN_OUT][1], sample(0.5, -1.001), whole
    ) == pytest.approx(0.001)
    with pytest.raises(
        GuardError, match=r"fan-out, one rule after the other: two engines disagree"
    ):
        _difference(recipe(), FAN_OUT, VARIANTS[FAN_OUT][1], sample(0.5, -1.1), whole)


def test_every_variant_s_seams_can_be_switched_off() -> None:
    """In a process of its own: the others need theirs."""
    every = "from serve.bench.ablation.run import VARIANTS, _switch_off; from vllm.plugins import load_general_plugins; load_general_plugins()"
    every += "; [_switch_off(variant.without) for variants in VARIANTS.values() for variant in variants]"  # raises where one stays
    done = subprocess.run(
        [sys.executable, "-c", every], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_report_is_kept_and_drawn(report: AblationReport, tmp_path: Path) -> None:
    path = tmp_path / "new" / "ablation.json"
    report.save(path)
    assert validate(json.loads(path.read_text()), AblationReport, where=path) == report
    draw(report, path.with_suffix(".png"))
    with Image.open(path.with_suffix(".png")) as image:
        assert image.size[0] > 500
