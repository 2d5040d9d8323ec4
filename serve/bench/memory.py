"""The part of a GPU's memory for a base that others lie beside. Knows nothing of their answers."""

from __future__ import annotations

from typing import Any

from guard.machine.device import installed_device
from serve.engine.backends.arguments import LARGEST_SHARE


def memory_beside(bases: int) -> dict[str, Any]:
    """vLLM EngineArgs of an engine whose base is one of so many in memory at the same time.

    On a GPU an equal part of it: where a recipe does not give its `device_gib`, vLLM would take
    nearly all for the first engine. On a CPU none: engines are sized by the recipe alone.
    """
    if installed_device() == "cpu":
        return {}
    return {"gpu_memory_utilization": LARGEST_SHARE / bases}
