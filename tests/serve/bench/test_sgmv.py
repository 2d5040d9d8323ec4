"""The microbenchmark of the low-rank products, on a batch or two.

All operators agree and are timed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from guard.errors import GuardError
from serve.bench.sgmv import (
    OPERATORS,
    OURS,
    Layer,
    Machine,
    SgmvBatch,
    SgmvReport,
    batches,
    check,
    draw,
    operators,
    run,
    table,
    work_of,
)
from tests.serve.guarded import recipe

pytestmark = pytest.mark.slow

RANKS = (16, 16, 4)
SMALL = [SgmvBatch("few", ((2, 3), (0, 3), (1, 4)), RANKS), SgmvBatch("one", ((1, 30),), RANKS)]


@pytest.fixture(scope="module")
def report() -> SgmvReport:
    return run(recipe(), repeats=2, make_batches=lambda rank: SMALL)


def test_every_operator_is_timed_on_every_batch(report: SgmvReport) -> None:
    assert [(row.batch, row.operator) for row in report.rows] == [
        (batch.name, name) for batch in SMALL for name in OPERATORS
    ]
    assert all(row.lower_bound_ms > 0 and 0 < row.ms.min <= row.ms.median for row in report.rows)
    assert report.rows[0].weights_mib == pytest.approx(
        report.rows[-1].weights_mib * (16 + 16 + 4) / 16
    )
    assert report.bandwidth_gb_s > 1 and report.gflop_s > 1
    assert "few" in table(report)


def test_another_type_of_numbers(report: SgmvReport) -> None:
    """Half as wide, half as much to read; and the operators agree in it too."""
    bfloat16 = recipe().model_copy(update={"dtype": "bfloat16"})
    half = run(bfloat16, 1, make_batches=lambda rank: SMALL, machine=Machine(1e10, 1e11))
    assert half.dtype == "bfloat16" and half.rows[0].weights_mib == report.rows[0].weights_mib / 2


def test_operators_that_disagree_stop_the_benchmark() -> None:
    of_batch = operators(SMALL[0])
    work = work_of(recipe(), SMALL[0], rank=16)
    check(SMALL[0], of_batch, work, 1e-4)
    ours = of_batch[OURS]

    def mixed_up(y: torch.Tensor, x: torch.Tensor, layer: Layer) -> None:
        ours(y, x.flip(0), layer)

    with pytest.raises(GuardError, match="two operators disagree"):
        check(SMALL[0], of_batch | {"loop over adapters": mixed_up}, work, 1e-4)


def test_the_batches_are_those_of_fan_outs_and_fleets() -> None:
    by_name = {batch.name: batch for batch in batches(16)}
    assert by_name["100 adapters x 3 tokens"].tokens == 300
    assert set(by_name["the same, ranks 16, 8 and 4"].ranks) == {16, 8, 4}
    assert by_name["12 conversations x 20 adapters x 3 tokens"].tokens == 720


def test_the_report_is_kept_and_drawn(report: SgmvReport, tmp_path: Path) -> None:
    path = tmp_path / "new" / "sgmv.json"
    report.save(path)
    assert SgmvReport.load(path) == report
    draw(report, path.with_suffix(".png"))
    with Image.open(path.with_suffix(".png")) as image:
        assert image.size[0] > 500
