"""A trained adapter is written as PEFT's two files, which name no path of this machine, while it
stands on its base.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.conftest import MakeJob, data
from train.adapter.trained import TrainedAdapter
from train.prefix.trainer import fit


def test_an_adapter_is_gone_once_the_next_is_asked_for(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("alora", max_steps=1)
    rows = data(job)
    (trained,) = fit([(job, rows)])
    assert isinstance(trained, TrainedAdapter) and len(trained.validation_logits) > 0
    with pytest.raises(RuntimeError, match="the next one was asked for"):
        trained.logits([rows.validation[0].prompt])
    with pytest.raises(RuntimeError, match="the next one was asked for"):
        trained.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
