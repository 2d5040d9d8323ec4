"""A race on a real engine, with few rules.

Every rule gets its verdict and its time, and the files are written.
"""

from __future__ import annotations

import io
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from serve.bench.race.report import RaceReport
from serve.bench.race.run import publish, run
from serve.bench.workload.random_adapter import random_adapters
from tests.serve.bench.small_engine import small_recipe

pytestmark = pytest.mark.slow

RULES, TOKENS = 4, 300


@pytest.fixture(scope="module")
def race() -> tuple[RaceReport, str]:
    small = small_recipe()
    output = io.StringIO()
    with random_adapters(small, ["lora", "alora"], 2) as made:
        folders = {method: list(of_method.values()) for method, of_method in made.items()}
        report = run(
            small,
            folders,
            tokens=TOKENS,
            rules=RULES,
            is_random=True,
            console=Console(file=output, force_terminal=False),
        )
    return report, output.getvalue()


def test_every_rule_has_a_verdict_and_its_time(race: tuple[RaceReport, str]) -> None:
    report, printed = race
    lora, alora = report.lanes
    for lane in report.lanes:
        assert len(lane.verdict_s) == len(lane.violations) == RULES
        assert 0 < min(lane.verdict_s) <= lane.finish_s
    assert lora.computed_tokens > RULES * TOKENS > alora.computed_tokens > TOKENS
    assert lora.violations[0] == lora.violations[2]  # the same adapter under another name
    assert f"LoRA      {RULES} of {RULES} verdicts" in printed
    assert report.adapters == "random weights"


def test_report_and_picture_are_written(
    race: tuple[RaceReport, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, _ = race
    publish(report, tmp_path)
    assert RaceReport.load(tmp_path / "race.json") == report
    ElementTree.parse(tmp_path / "race.svg")
    printed = capsys.readouterr().out
    assert report.result in printed and "race.svg" in printed
