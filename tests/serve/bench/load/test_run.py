"""The load benchmark on a real engine, small.

All methods get the same traffic, except those that are saturated.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from serve.bench.load.plot import draw
from serve.bench.load.report import LoadReport, table
from serve.bench.load.run import run
from tests.serve.bench.small_engine import small_recipe
from tests.serve.cards import recipe

pytestmark = pytest.mark.slow

CHECKS, REPEATS = 12, 1
FEW_RULES = (3, 5)  # with so few, a LoRA's conversation fits into a turn of the fair queue


@pytest.fixture(scope="module")
def report() -> Iterator[LoadReport]:
    # A low bar and short steps: a queue of so few conversations must be seen to grow on any
    # machine. The bar stays, as a row is compared with it whenever it is read.
    small = small_recipe(max_num_batched_tokens=512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve.bench.load.report.SATURATED_GROWTH", 1.05)
        yield run(small, (1000.0, 2000.0), CHECKS, REPEATS, FEW_RULES)


def test_both_methods_get_the_same_traffic_and_an_alora_computes_a_fraction(
    report: LoadReport,
) -> None:
    lora, alora = report.rows
    assert [lora.method, alora.method] == recipe().adapter_methods
    assert lora.offered_per_second == alora.offered_per_second and lora.verdicts == alora.verdicts
    least, most = FEW_RULES
    assert REPEATS * CHECKS * least <= alora.verdicts <= REPEATS * CHECKS * most
    assert alora.computed_tokens < lora.computed_tokens / 3
    assert alora.computed_tokens <= alora.needed_tokens == lora.needed_tokens
    assert alora.swap_ins == 0
    assert 0 < alora.p50_ms <= alora.p95_ms <= alora.p99_ms


def test_a_saturated_method_is_left_out_at_higher_rates(report: LoadReport) -> None:
    # A thousand a second; the second rate was left out.
    assert [row.is_saturated for row in report.rows] == [True, True]
    rate = report.rows[-1].answered_per_second
    assert f"saturated at {rate:.1f} requests/s" in table(report)


def test_the_report_is_kept_and_drawn(report: LoadReport, tmp_path: Path) -> None:
    path = tmp_path / "new" / "load.json"
    report.save(path)
    assert LoadReport.load(path) == report
    draw(report, path.with_suffix(".png"))
    with Image.open(path.with_suffix(".png")) as image:
        assert image.size[0] > 500
