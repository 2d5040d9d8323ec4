"""The microbenchmark's table, of made-up times."""

from __future__ import annotations

from pathlib import Path

from serve.bench.sgmv.report import SgmvReport, table
from tests.serve.bench.sgmv.toy_report import toy_report


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sgmv.json"
    toy_report().save(path)
    assert SgmvReport.load(path) == toy_report()


def test_the_table_names_a_batch_once_and_says_how_far_from_the_lower_bound() -> None:
    _, _, ours, loop, vllms, *_, caption = table(toy_report()).splitlines()
    assert ours.startswith("few") and "3.0 (3.0 to 3.0)" in ours and "1.5x" in ours
    assert loop.startswith("   ") and "loop over adapters" in loop and "3.0x" in loop
    assert "vLLM's operator" in vllms and "4.5x" in vllms
    assert "4 layers" in caption and "at 20 GB/s" in caption and caption.endswith("median of 1.")
