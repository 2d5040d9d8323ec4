"""The microbenchmark of the low-rank products, on two small batches: all operators are timed."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.bench.sgmv import run as benchmark
from serve.bench.sgmv.machine import Machine
from serve.bench.sgmv.report import LOOP, OURS, VLLMS, SgmvReport
from serve.bench.sgmv.run import arguments, main, run
from tests.serve.bench.sgmv.toy_batches import FEW, ONE
from tests.serve.cards import recipe

SMALL = [FEW, ONE]


@pytest.fixture(scope="module")
def report() -> SgmvReport:
    return run(recipe(), repeats=2, make_batches=lambda rank: SMALL)


@pytest.mark.slow
def test_every_operator_is_timed_on_every_batch(report: SgmvReport) -> None:
    assert [(row.batch, row.operator) for row in report.rows] == [
        (batch.name, name) for batch in SMALL for name in (OURS, LOOP, VLLMS)
    ]
    assert all(row.lower_bound_ms > 0 and 0 < row.ms.min <= row.ms.median for row in report.rows)
    assert report.rows[0].weights_mib == pytest.approx(
        report.rows[-1].weights_mib * (16 + 16 + 4) / 16
    )
    assert report.bandwidth_gb_s > 1 and report.gflop_s > 1


@pytest.mark.slow
def test_another_type_of_numbers(report: SgmvReport) -> None:
    """Half as wide, half as much to read; and the operators agree in it too."""
    bfloat16 = recipe().model_copy(update={"dtype": "bfloat16"})
    half = run(bfloat16, 1, make_batches=lambda rank: SMALL, machine=Machine(1e10, 1e11))
    assert half.dtype == "bfloat16" and half.rows[0].weights_mib == report.rows[0].weights_mib / 2


def test_a_dtype_without_a_tolerance_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = recipe().model_copy(update={"engine": {"dtype": "float16"}})
    monkeypatch.setattr(benchmark, "load_recipe", lambda name: served)
    monkeypatch.setattr(benchmark, "run", lambda *_: pytest.fail("measured"))
    parser = argparse.ArgumentParser()
    arguments(parser)
    options = parser.parse_args([])
    options.model, options.runs = "tiny", tmp_path
    with pytest.raises(GuardError, match=r"no tolerance.*got float16.*--dtype") as refused:
        main(options)
    assert "float32, bfloat16" in str(refused.value)
