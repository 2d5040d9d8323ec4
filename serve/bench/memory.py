"""The part of a GPU's memory for one of several bases. Knows nothing of their answers."""

from __future__ import annotations

from typing import Any

from guard.machine.device import installed_device
from serve.engine.backends.arguments import LARGEST_SHARE


def memory_beside(bases: int) -> dict[str, Any]:
    """vLLM's EngineArgs for an engine whose base is one of `bases` in memory at the same time.

    On a GPU each gets an equal part of the memory: where a recipe does not give its `device_gib`,
    vLLM would take nearly all of it for the first engine. On a CPU none are needed: engines are
    sized by the recipe alone.
    """
    if installed_device() == "cpu":
        return {}
    return {"gpu_memory_utilization": LARGEST_SHARE / bases}
