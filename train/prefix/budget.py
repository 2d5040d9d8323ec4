"""How much memory the prefixes of a training run may take. Knows nothing of what is kept in it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from guard.errors import GuardError
from train.job import Job

GIB = 2**30
# The share of the memory that is free at the start, unless the recipe states how much.
FREE_SHARE = 0.5
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Budget:
    """Bytes of keys and values in each tier. On a CPU the device's memory is the host's: leave it
    at 0.
    """

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


def budget_of(job: Job, device: torch.device) -> Budget:
    """The sizes that the recipe states, else a share of what is free. Raises GuardError for more
    than is free.
    """
    stated = job.recipe.prefix_cache_gib
    free_device = 0
    if device.type == "cuda":
        free_device = torch.cuda.mem_get_info(device)[0]
    free_host = free_memory()
    _check_room(job, "device", stated.device, free_device)
    _check_room(job, "host", stated.host, free_host)
    _check_room(job, "disk", stated.disk, shutil.disk_usage(job.runs.root).free)
    return Budget(
        device=_bytes(stated.device, free_device),
        host=_bytes(stated.host, free_host),
        disk=int(stated.disk * GIB),
    )


def free_memory(cgroups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """The bytes of host memory that are free on the machine and within the limits of the process's
    control group and of those above it (containers, services).

    Pages of files that the kernel can drop count as free. A limit that cannot be read, such as one
    of control groups of version 1, does not count.
    """
    free = [int(psutil.virtual_memory().available)]
    for line in _text(membership).splitlines():
        _, separator, path = line.partition("0::/")
        if not separator:
            continue
        for group in (cgroups / path, *(cgroups / path).parents):
            limit = _text(group / "memory.max").strip()
            usage = _text(group / "memory.current").strip()
            if limit.isdigit() and usage.isdigit():
                stat = dict(line.split() for line in _text(group / "memory.stat").splitlines())
                free.append(int(limit) - int(usage) + int(stat.get("inactive_file", 0)))
            if group == cgroups:
                break
    return max(0, min(free))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _bytes(stated_gib: float | None, free: int) -> int:
    if stated_gib is None:
        return int(free * FREE_SHARE)
    return int(stated_gib * GIB)


def _check_room(job: Job, tier: str, stated_gib: float | None, free: int) -> None:
    gib = stated_gib or 0
    if gib * GIB > free:
        resource = {"device": "GPU memory", "host": "memory", "disk": "disk space"}[tier]
        raise GuardError(
            f"not enough {resource}",
            where=f"recipe {job.recipe.name}: prefix_cache_gib.{tier}",
            got=f"{gib:g} GiB, {free / GIB:.1f} free",
            remedy="Lower it, or free some",
        )
