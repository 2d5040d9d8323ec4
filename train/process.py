"""Which of several processes this is, and which rules and GPU are its own.

Knows nothing of what is trained. Must not import torch: which GPU is seen is decided before that.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import NamedTuple

from guard.errors import GuardError
from guard.machine.provenance import gpus

LAUNCHED = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
LAUNCHED_PREFIXES = ("ACCELERATE_", "TORCHELASTIC_")
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


class Process(NamedTuple):
    """This process's number, how many processes share the rules, and how many of these are on this
    machine.
    """

    number: int = 0
    total: int = 1
    on_this_machine: int = 1


ALONE = Process()


def process_of(environment: MutableMapping[str, str]) -> Process:
    """This process among those that `accelerate launch` or `torchrun` started.

    From here on it is a world of its own: processes divide the rules among them, not tokens, so
    nothing has to be exchanged, and no trainer below may try to. Each sees the one GPU of its rank,
    and a process alone the first: Transformers would spread a LoRA's batches over all. Must come
    before torch is imported. Raises GuardError for fewer GPUs than processes, and for a rank that
    none of the processes has.
    """
    world = int(environment.get("WORLD_SIZE", 1))
    rank, local_rank, local_world = 0, 0, 1
    if world > 1:
        rank = int(environment.get("RANK", 0))
        local_rank = int(environment.get("LOCAL_RANK", 0))
        local_world = int(environment.get("LOCAL_WORLD_SIZE", world))
        _check_rank("RANK", rank, "WORLD_SIZE", world)
        _check_rank("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world)
        for name in list(environment):
            if name in LAUNCHED or name.startswith(LAUNCHED_PREFIXES):
                del environment[name]
    devices = _devices(environment)
    if devices:
        if local_world > len(devices):
            got = f"{local_world} processes, {len(devices)} GPUs"
            raise GuardError(
                "each process needs a GPU", got=got, remedy="Start at most one process per GPU"
            )
        environment[VISIBLE_GPUS] = devices[local_rank]
    return Process(rank, world, local_world)


def _check_rank(rank_name: str, rank: int, count_name: str, count: int) -> None:
    if not 0 <= rank < count:
        raise GuardError(
            f"{rank_name} must be at least 0 and below {count_name}",
            got=f"{rank_name}={rank}, {count_name}={count}",
            remedy="Start with `accelerate launch` or `torchrun`, which set them",
        )


def _devices(environment: MutableMapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = environment.get(VISIBLE_GPUS)
    if named is None:
        return [str(number) for number in range(len(gpus()))]
    return [name for name in named.split(",") if name]
