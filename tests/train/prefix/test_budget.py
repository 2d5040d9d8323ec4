"""The memory that prefixes may take: a share of what is free, or what the recipe states."""

from __future__ import annotations

from dataclasses import replace

import psutil
import pytest
import torch

from guard.errors import GuardError
from guard.recipe import PrefixCacheSize
from tests.train.conftest import (
    MakeJob,
)
from train.prefix.budget import Budget, budget_of


def test_the_free_memory_is_shared_by_the_processes_and_stated_sizes_are_held_against_it(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stated_budget(processes: int, **stated: float) -> Budget:
        recipe = job.recipe.model_copy(update={"prefix_cache_gib": PrefixCacheSize(**stated)})
        return budget_of(replace(job, recipe=recipe), torch.device("cpu"), processes)

    job = make_job("alora")
    free = psutil.virtual_memory()._replace(available=8 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    assert [stated_budget(processes).host for processes in (1, 4)] == [4 * 2**30, 2**30]
    assert stated_budget(4, host=7.0).host == 7 * 2**30
    with pytest.raises(
        GuardError, match=r"recipe toy: prefix_cache_gib\.host: .*got 9 GiB, 8\.0 free"
    ):
        stated_budget(1, host=9.0)
    for tier in ("disk", "device"):
        with pytest.raises(GuardError, match=rf"prefix_cache_gib\.{tier}: .*1e\+09 GiB"):
            stated_budget(1, **{tier: 1e9})
