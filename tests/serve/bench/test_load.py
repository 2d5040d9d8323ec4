"""The load benchmark on a real engine, small: the same traffic for all that are not saturated."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.bench import load
from serve.bench.load import LoadBench, LoadCell, growth
from serve.bench.report import GridReport
from tests.serve.bench.small_engine import small_recipe
from tests.serve.bench.toy_bench import bench_on
from tests.serve.cards import recipe

CHECKS = 12


@pytest.mark.slow
def test_both_methods_get_the_same_traffic_until_they_are_saturated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A low bar and short steps: a queue of so few conversations must be seen to grow on any
    # machine. With so few rules, a LoRA's conversation fits into a turn of the fair queue.
    monkeypatch.setattr(load, "SATURATED_GROWTH", 1.05)
    monkeypatch.setattr(load, "RATES", (1000.0, 2000.0))
    monkeypatch.setattr(LoadBench, "rules", (3, 5))
    words = ["--checks", str(CHECKS), "--repeats", "1"]
    small = small_recipe(max_num_batched_tokens=512)
    bench = bench_on("load", tmp_path, *words, recipe=small)
    bench.main()
    report = GridReport.load(tmp_path / "load_bench.json")
    lora, alora = report.rows
    assert [lora.cell["method"], alora.cell["method"]] == recipe().adapter_methods
    for quantity in ("offered_per_second", "verdicts"):
        assert lora.median(quantity) == alora.median(quantity)
    assert CHECKS * 3 <= alora.median("verdicts") <= CHECKS * 5
    assert alora.median("tokens_per_verdict") < lora.median("tokens_per_verdict") / 3
    assert alora.median("of_needed") <= 1 < lora.median("of_needed")
    assert alora.median("swap_ins") == 0 < alora.measured["check_ms"].min
    # A thousand a second; the second rate was left out.
    assert [missing.cell["rate"] for missing in report.left_out] == [2000.0, 2000.0]
    rate = lora.median("answered_per_second")
    assert f"lora is saturated at {rate:.1f} a second." in bench.notes(report)
    assert bench.panels(report) == []


def test_a_method_is_left_out_above_the_rate_that_saturates_it(tmp_path: Path) -> None:
    bench: LoadBench = bench_on("load", tmp_path)
    cells = {(cell.rate, cell.method): cell for cell in bench.cells()}
    assert len(cells) == 10 and {cell.repeats for cell in cells.values()} == {3}
    samples = {
        cells[1.0, "lora"]: [{"growth": 1.9}, {"growth": 2.1}, {"growth": 5.0}],
        cells[1.0, "alora"]: [{"growth": 1.9}, {"growth": 1.9}, {"growth": 5.0}],
    }
    assert bench.skipped(cells[2.0, "lora"], samples) == "1 conversations a second saturate it"
    assert bench.skipped(cells[2.0, "alora"], samples) == ""
    assert isinstance(cells[2.0, "lora"], LoadCell)


def test_growth_compares_the_waits_at_the_end_with_those_at_the_beginning() -> None:
    assert growth([1.0, 2.0, 1.5, 9.0, 1.0, 2.0, 1.5, 1.0, 2.0]) == 1.0
    assert growth([float(number) for number in range(1, 10)]) == 4.0
    assert growth([0.5]) == 1.0
