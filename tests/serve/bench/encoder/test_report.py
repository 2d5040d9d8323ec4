"""The encoder's table and crossovers, on made-up times."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.bench.encoder.report import EncoderCell, EncoderReport, caption, crossover, table
from tests.serve.bench.encoder.toy_report import toy_cells, toy_report


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    toy_report().save(tmp_path / "encoder_bench.json")
    assert EncoderReport.load(tmp_path / "encoder_bench.json") == toy_report()


def test_the_table_has_a_line_for_each_cell_and_says_which_rules_are_trained() -> None:
    report = toy_report()
    *_, last = lines = table(report).splitlines()
    assert len(lines) == 3 + len(report.cells)
    assert last == "swap-ins while the clock ran: 0; trained: minilm lora"
    assert caption(report).endswith("median of 1 repeats; trained: minilm lora.")


def test_beside_a_decoder_the_table_says_from_how_many_rules_on_its_aloras_are_faster() -> None:
    last = table(toy_report(beside="tiny")).splitlines()[-1]
    assert last.startswith("10 tokens: aLoRAs on tiny are faster than adapters on minilm from 10.0")


def _line(*walls_ms: float) -> list[EncoderCell]:
    return toy_cells("any", "lora", *walls_ms)


def test_the_crossover_lies_where_the_lines_of_log_ms_over_log_rules_meet() -> None:
    assert crossover(_line(1, 10, 100), _line(10, 10, 10)) == pytest.approx(10, rel=0.01)
    assert crossover(_line(1, 10, 100), _line(3.1623, 5, 5)) == pytest.approx(4.21, abs=0.01)
    assert crossover(_line(5, 50, 500), _line(1, 2, 3)) == 1
    assert crossover(_line(1, 2, 3), _line(9, 9, 9)) is None
