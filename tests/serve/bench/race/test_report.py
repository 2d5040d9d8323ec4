"""The race's numbers in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.bench.race.report import RaceReport, caption, duration, speedup
from tests.serve.bench.race.toy_race import toy_race


def test_the_result_is_a_line_with_both_times_and_the_ratio() -> None:
    report = toy_race(lora_s=12.0, alora_s=0.2)
    assert report.result == "LoRA 12.0 s, aLoRA 0.20 s: 60x"
    assert speedup(toy_race(lora_s=1.0, alora_s=0.4)) == "2.5x"


@pytest.mark.parametrize(("seconds", "text"), [(0.237, "0.24 s"), (13.82, "13.8 s")])
def test_times_have_as_many_digits_as_mean_something(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_report_comes_back_from_its_file_and_its_caption_says_where_it_was_run(
    tmp_path: Path,
) -> None:
    report = toy_race()
    report.save(tmp_path / "race.json")
    assert RaceReport.load(tmp_path / "race.json") == report
    assert "two cores" in caption(report) and "100 rules" in caption(report)
    assert "1,000 tokens" in caption(report) and "abc1234" in caption(report)
