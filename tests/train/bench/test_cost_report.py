"""Tables and picture of the training benchmark."""

from __future__ import annotations

from pathlib import Path

from train.bench.cost_report import RunCell, StepCell, Timing, draw, table


def test_a_timing_is_median_lowest_and_highest() -> None:
    timing = Timing.of([0.4, 2.0, 0.3])
    assert timing == (0.4, 0.3, 2.0)
    assert str(timing) == "400 (300 to 2,000)"


def test_the_table_states_times_and_ratios(tmp_path: Path) -> None:
    trl, first, later = Timing(2.0, 1.9, 2.2), Timing(0.5, 0.4, 0.6), Timing(0.1, 0.1, 0.1)
    cell = StepCell("tiny", 1000, 24, trl, first, later, 800.0, 200.0)
    runs = [
        RunCell("TRL + PEFT", 1, 300.0, 1.0),
        RunCell("cached prefixes", 1, 60.0, 1.0),
        RunCell("cached prefixes", 10, 240.0, 0.5),
    ]
    text = table([cell], runs)
    times = "2,000 (1,900 to 2,200) | 500 (400 to 600) | 4.0x | 100 (100 to 100) | 20.0x"
    assert f"| tiny | 1,000 | {times} | 800 | 200 | 25% |" in text
    assert "| TRL + PEFT | 1 | 300 | 5.0x | 100% |" in text
    assert "| cached prefixes | 10 | 240 | 4.0x | 50% |" in text
    draw([cell], runs, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
