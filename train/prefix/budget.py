"""How much memory the prefixes of a training run may take. Knows nothing of what is kept in it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import psutil
import torch

from guard.errors import GuardError
from train.job import Job
from train.prefix.memory import free_memory

GIB = 2**30
# The share of the memory that is free at the start, unless the recipe states how much.
FREE_SHARE = 0.5


@dataclass(frozen=True)
class Budget:
    """Bytes of keys and values in each tier.

    On a CPU the device's memory is the host's: leave it at 0.
    """

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """The bytes of all tiers together."""
        return self.device + self.host + self.disk


def budget_of(job: Job, device: torch.device, processes: int) -> Budget:
    """The sizes that the recipe states, else a share of what is free, the host's in parts for
    `processes`.

    Raises GuardError for more than is free, and for more than this machine has for all `processes`:
    each takes what is stated of the host's memory and of the disk.
    """
    stated = job.recipe.prefix_cache_gib
    free_device = 0
    if device.type == "cuda":
        free_device = torch.cuda.mem_get_info(device)[0]
    free_host = free_memory()
    disk = shutil.disk_usage(job.runs.root)
    _check_room(job, "device", stated.device, free_device)
    _check_room(job, "host", stated.host, free_host)
    _check_room(job, "disk", stated.disk, disk.free)
    # Others may have taken theirs already, so all together are held against all that there is.
    _check_room(job, "host", stated.host, psutil.virtual_memory().total, processes)
    _check_room(job, "disk", stated.disk, disk.total, processes)
    return Budget(
        device=_bytes(stated.device, free_device * FREE_SHARE),
        host=_bytes(stated.host, free_host * FREE_SHARE / processes),
        disk=int(stated.disk * GIB),
    )


def _bytes(stated_gib: float | None, otherwise: float) -> int:
    if stated_gib is None:
        return int(otherwise)
    return int(stated_gib * GIB)


def _check_room(
    job: Job, tier: str, stated_gib: float | None, room: int, processes: int = 1
) -> None:
    gib = stated_gib or 0
    wanted, there_is = f"{gib:g} GiB", "free"
    if processes > 1:
        wanted, there_is = f"{wanted} for each of {processes} processes", "in all"
    resource = {"device": "GPU memory", "host": "memory", "disk": "disk space"}[tier]
    if gib * processes * GIB > room:
        raise GuardError(
            f"not enough {resource}",
            where=f"recipe {job.recipe.name}: prefix_cache_gib.{tier}",
            got=f"{wanted}, {room / GIB:.1f} {there_is}",
            remedy="Lower it, or free some",
        )
