"""The ablation on real engines, small: what is switched off is off, and the numbers are those of the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from guard.layout import ROOT
from guard.yaml_file import validate
from serve.ablation_bench import CONVERSATIONS, EVERYTHING, NO_TAILS, VARIANTS, AblationReport, Variant, draw, run, table
from tests.serve.guarded import recipe

TOKENS, RULES = 150, 4


@pytest.fixture(scope="module")
def report() -> AblationReport:
    small = recipe().model_copy(update={"engine": recipe().engine | {"kv_cache_memory_bytes": 2**26}})
    unshared = next(variant for variant in VARIANTS if variant.name.startswith("no blocks"))
    variants = (VARIANTS[0], unshared, Variant("no tails", engine=NO_TAILS), Variant("title", rule_turn="title"))
    return run(small, variants, tokens=TOKENS, rules=RULES, rounds=1)


def test_what_is_switched_off_is_off(report: AblationReport) -> None:
    computed = {row.variant: row.computed_tokens for row in report.rows}
    assert computed[EVERYTHING] < computed["no tails"] < computed["no blocks shared between adapters"]
    assert computed["no blocks shared between adapters"] > 0.9 * TOKENS * RULES
    assert computed["title"] > computed[EVERYTHING] + 10 * RULES


def test_every_engine_is_timed(report: AblationReport) -> None:
    assert report.conversations == CONVERSATIONS
    for row in report.rows:
        assert 0 < row.wall_ms_min <= row.wall_ms <= row.wall_ms_max
        assert 0 < row.engine_ms <= row.wall_ms
        assert 0 < row.limit_ms < row.engine_ms  # one prompt is cheaper than the same tokens of many
        assert row.adapters_brought == 0 and 100 < row.peak_memory_mib <= report.peak_memory_mib
    line = next(line for line in table(report).splitlines() if line.startswith(EVERYTHING))
    assert line.endswith("1.00")


def test_every_variant_s_seams_can_be_switched_off() -> None:
    """In a process of its own: the others need theirs."""
    every = "from serve.ablation_bench import VARIANTS, _switch_off; from vllm.plugins import load_general_plugins; load_general_plugins()"
    every += "; [_switch_off(variant.without) for variant in VARIANTS]"  # raises where one stays
    done = subprocess.run([sys.executable, "-c", every], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_report_is_kept_and_drawn(report: AblationReport, tmp_path: Path) -> None:
    path = tmp_path / "new" / "ablation.json"
    report.save(path)
    assert validate(json.loads(path.read_text()), AblationReport, where=path) == report
    draw(report, path.with_suffix(".png"))
    with Image.open(path.with_suffix(".png")) as image:
        assert image.size[0] > 500
