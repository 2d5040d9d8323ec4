"""Steps that are timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.step_times import BATCH, STEPS, cached_ends_s, job_of, random_rows, trl_ends_s

pytestmark = pytest.mark.slow


def test_both_sides_take_the_same_steps_of_equal_rows(tmp_path: Path) -> None:
    job = job_of("tiny", tmp_path)
    rows = random_rows(job, 40)
    assert len({row.prompt.token_ids for row in rows.train}) == BATCH
    for ends_s in (trl_ends_s(job, rows), cached_ends_s(job, rows)):
        assert len(ends_s) == STEPS and ends_s == sorted(ends_s)
