"""A job whose method is a head."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.train.conftest import MakeJob
from train.job import Job


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    job = make_job("head", n_train=96)
    methods = job.recipe.methods | {"head": type(job.recipe.methods["lora"])()}
    return replace(job, recipe=job.recipe.model_copy(update={"methods": methods}))
