"""The one GPU that a command trains on. Must not import torch, which reads once what it may see."""

from __future__ import annotations

from collections.abc import MutableMapping

from guard.errors import GuardError
from guard.machine.provenance import gpus

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def see_one_gpu(environment: MutableMapping[str, str]) -> None:
    """Leave this process the first of the GPUs that it may use. Must come before torch is imported.
    Transformers would spread a LoRA's batches over all of them. Raises GuardError in one of several
    processes that a launcher has started: each would train all rules.
    """
    processes = environment.get("WORLD_SIZE", "1")
    if processes != "1":
        raise GuardError(
            "a command trains its rules in one process",
            got=f"WORLD_SIZE={processes}",
            remedy=f"Start one command a GPU, each with rules and {VISIBLE_GPUS} of its own",
        )
    named = environment.get(VISIBLE_GPUS)
    devices = [str(number) for number in range(len(gpus()))]
    if named is not None:
        devices = [name for name in named.split(",") if name]
    if devices:
        environment[VISIBLE_GPUS] = devices[0]
