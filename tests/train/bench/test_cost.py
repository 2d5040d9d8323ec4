"""The training benchmark on its smallest grid: both sides really train, and the report says what
was measured.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from train import process
from train.bench import cost
from train.bench.cost import CostGrid, measure

pytestmark = pytest.mark.slow


def test_both_sides_are_measured() -> None:
    (cell,), runs = measure(
        CostGrid(
            bases=("tiny",),
            prefixes=(200,),
            repeats=1,
            steps=1,
            examples=8,
            epochs=1,
            rules=(1, 2),
            adapter_steps=2,
        ),
        shares_process=True,
    )
    assert min(*cell.trl_s, *cell.cached_s) > 0
    assert cell.trl_mib > cell.cached_mib
    assert [(run.side, run.rules) for run in runs] == [
        ("TRL + PEFT", 1),
        ("cached prefixes", 1),
        ("cached prefixes", 2),
    ]
    assert all(run.seconds > 0 and run.measured == 1.0 for run in runs)
    assert len(json.loads(json.dumps(asdict(cell)))["trl_s"]) == 3


def test_of_several_gpus_the_first_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers would spread TRL's batches over all that are visible."""
    monkeypatch.setenv(process.VISIBLE_GPUS, "2,3")
    seen = []

    def stop(*_: object) -> None:
        seen.append(os.environ[process.VISIBLE_GPUS])
        raise KeyboardInterrupt

    monkeypatch.setattr(cost, "measure", stop)
    with pytest.raises(KeyboardInterrupt):
        cost.main(argparse.Namespace(quick=True, runs=tmp_path))
    assert seen == ["2"]
