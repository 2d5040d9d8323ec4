"""The microbenchmark of the low-rank products, on a batch or two: all operators agree and are timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from guard.errors import GuardError
from guard.files.yaml_file import validate
from serve.bench import sgmv as sgmv_bench
from serve.bench.sgmv import (
    OPERATORS,
    Batch,
    SgmvReport,
    batches,
    draw,
    layers_of,
    operators,
    run,
    table,
)
from tests.serve.guarded import recipe

RANKS = (16, 16, 4)
SMALL = [Batch("few", ((2, 3), (0, 3), (1, 4)), RANKS), Batch("one", ((1, 30),), RANKS)]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> SgmvReport:
    monkeypatch.setattr(sgmv_bench, "batches", lambda rank: SMALL)
    return run(recipe(), repeats=2)


def test_every_operator_is_timed_on_every_batch(report: SgmvReport) -> None:
    assert [(row.batch, row.operator) for row in report.rows] == [
        (batch.name, name) for batch in SMALL for name in OPERATORS
    ]
    assert all(row.floor_ms > 0 and 0 < row.ms_min <= row.ms <= row.ms_max for row in report.rows)
    assert report.rows[0].weights_mib == pytest.approx(
        report.rows[-1].weights_mib * (16 + 16 + 4) / 16
    )
    assert report.bandwidth_gb_s > 1 and report.gflop_s > 1
    assert "few" in table(report)


def test_another_type_of_numbers(report: SgmvReport) -> None:
    """Half as wide, half as much to read; and the operators agree in it too."""
    half = run(recipe().model_copy(update={"dtype": "bfloat16"}), repeats=1)
    assert half.dtype == "bfloat16" and half.rows[0].weights_mib == report.rows[0].weights_mib / 2


def test_operators_that_disagree_stop_the_benchmark() -> None:
    found = operators(SMALL[0])
    work = sgmv_bench._work(layers_of(recipe(), 16, RANKS, seed=0), SMALL[0].tokens)
    sgmv_bench._check(SMALL[0], found, work, 1e-4)

    def mixed_up(y: torch.Tensor, x: torch.Tensor, layer: sgmv_bench.Layer) -> None:
        found[OPERATORS[0]](y, x.flip(0), layer)

    with pytest.raises(GuardError, match="two operators disagree"):
        sgmv_bench._check(SMALL[0], found | {OPERATORS[1]: mixed_up}, work, 1e-4)


def test_the_batches_are_those_of_fan_outs_and_fleets() -> None:
    found = {batch.name: batch for batch in batches(16)}
    assert found["100 adapters x 3 tokens"].tokens == 300
    assert set(found["the same, ranks 16, 8 and 4"].ranks) == {16, 8, 4}
    assert found["12 conversations x 20 adapters x 3 tokens"].tokens == 720


def test_the_report_is_kept_and_drawn(report: SgmvReport, tmp_path: Path) -> None:
    path = tmp_path / "new" / "sgmv.json"
    report.save(path)
    assert validate(json.loads(path.read_text()), SgmvReport, where=path) == report
    draw(report, path.with_suffix(".png"))
    with Image.open(path.with_suffix(".png")) as image:
        assert image.size[0] > 500
