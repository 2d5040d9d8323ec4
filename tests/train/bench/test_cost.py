"""The training benchmark on its smallest grid: both sides really train, and the report says what
was measured.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

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
