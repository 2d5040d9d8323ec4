"""The memory that prefixes may take: a share of what is free, or what the recipe states."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from pytest import MonkeyPatch

from guard.errors import GuardError
from guard.recipe import PrefixCacheSize
from tests.train.conftest import MakeJob
from train.prefix.budget import GIB, Budget, budget_of, free_memory


def free(monkeypatch: MonkeyPatch, size: int) -> None:
    memory = psutil.virtual_memory()._replace(available=size)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def test_half_of_the_free_memory_is_taken(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    job = make_job("alora")
    free(monkeypatch, 8 * GIB)
    monkeypatch.setattr("train.prefix.budget.free_memory.__defaults__", (Path("/none"),) * 2)
    disk = shutil.disk_usage(job.runs.root)._replace(free=8 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)

    def stated(**gib: float) -> Budget:
        recipe = job.recipe.model_copy(update={"prefix_cache_gib": PrefixCacheSize(**gib)})
        return budget_of(replace(job, recipe=recipe), torch.device("cpu"))

    assert stated() == Budget(host=4 * GIB)
    assert stated(host=8.0, disk=8.0) == Budget(host=8 * GIB, disk=8 * GIB)
    for tier, room in (("host", "8.0"), ("disk", "8.0"), ("device", "0.0")):
        told = rf"recipe toy: prefix_cache_gib\.{tier}: .*got 9 GiB, {room} free"
        with pytest.raises(GuardError, match=told):
            stated(**{tier: 9.0})


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text + "\n")


def test_limits_of_control_groups_hold_too(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Pages of files count as free. A group over its limit leaves nothing."""
    free(monkeypatch, 1000)
    own, groups = tmp_path / "own", tmp_path / "groups"
    assert free_memory(groups, own) == 1000
    own.write_text("4:memory:/other\n0::/service/job\n")
    group(groups / "service" / "job", max="max", current="100")
    assert free_memory(groups, own) == 1000
    group(groups / "service", max="500", current="300", stat="anon 200\ninactive_file 60")
    assert free_memory(groups, own) == 260
    group(groups, max="500", current="600")
    assert free_memory(groups, own) == 0
