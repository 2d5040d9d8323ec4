"""The memory that prefixes may take: a share of what is free, or what the recipe states."""

from __future__ import annotations

import shutil
from dataclasses import replace

import psutil
import pytest
import torch

from guard.errors import GuardError
from guard.recipe import PrefixCacheSize
from tests.train.conftest import MakeJob
from train.prefix.budget import Budget, budget_of


def test_the_free_memory_is_shared_by_the_processes_and_stated_sizes_are_held_against_it(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stated_budget(processes: int, **stated: float) -> Budget:
        recipe = job.recipe.model_copy(update={"prefix_cache_gib": PrefixCacheSize(**stated)})
        return budget_of(replace(job, recipe=recipe), torch.device("cpu"), processes)

    job = make_job("alora")
    memory = psutil.virtual_memory()._replace(available=8 * 2**30, total=16 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert [stated_budget(processes).host for processes in (1, 4)] == [4 * 2**30, 2**30]
    assert stated_budget(1, host=7.0).host == stated_budget(1, host=8.0).host - 2**30 == 7 * 2**30
    assert stated_budget(2, host=7.0).host == 7 * 2**30  # though both do not fit into what is free
    with pytest.raises(
        GuardError, match=r"recipe toy: prefix_cache_gib\.host: .*got 9 GiB, 8\.0 free"
    ):
        stated_budget(1, host=9.0)
    disk = shutil.disk_usage(job.runs.root)._replace(free=8 * 2**30, total=16 * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    for tier in ("host", "disk"):
        with pytest.raises(GuardError, match=r"got 6 GiB for each of 4 processes, 16\.0 in all"):
            stated_budget(4, **{tier: 6.0})
    for tier in ("disk", "device"):
        with pytest.raises(GuardError, match=rf"prefix_cache_gib\.{tier}: .*1e\+09 GiB"):
            stated_budget(1, **{tier: 1e9})
