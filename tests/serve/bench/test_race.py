"""A race on a real engine, with few rules.

Every rule gets its verdict and its time, and the files are written.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from serve.bench.race_picture import RaceReport
from tests.serve.bench.toy_bench import bench_on


@pytest.mark.slow
def test_every_rule_has_a_verdict_and_its_time_and_report_and_picture_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules, tokens = 4, 300
    bench = bench_on("race", tmp_path, "--rules", str(rules), "--tokens", str(tokens))
    bench.main()
    report = RaceReport.load(tmp_path / "race.json")
    lora, alora = report.lanes
    for lane in report.lanes:
        assert len(lane.verdict_s) == rules
        assert 0 < min(lane.verdict_s) <= lane.finish_s
    assert lora.computed_tokens > rules * tokens > alora.computed_tokens > tokens
    ElementTree.parse(tmp_path / "race.svg")
    printed = capsys.readouterr().out
    assert report.result in printed and "race.svg" in printed and f"{rules}/{rules}" in printed
