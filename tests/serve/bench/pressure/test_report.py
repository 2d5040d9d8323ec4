"""The pressure benchmark's table, of made-up figures."""

from __future__ import annotations

from serve.bench.pressure.report import table
from tests.serve.bench.pressure.toy_report import toy_report


def test_the_table_has_a_line_for_each_engine_and_round() -> None:
    report = toy_report()
    text = table(report)
    lines = [line for line in text.splitlines() if line.startswith(("new ", "again "))]
    assert len(lines) == len(report.rows)
    assert "0.5x" in lines[0] and "150.0%" in lines[0]
    assert "8 conversations of 400 tokens at once, 5 rules each, then again with 87 more" in text
