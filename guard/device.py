"""Which kind of device this environment computes on. Knows nothing of torch or vLLM, and imports
neither.
"""

from __future__ import annotations

import importlib.metadata
from typing import Literal

Device = Literal["cpu", "cuda"]


def installed_device() -> Device:
    """What the installed torch was built for, as `make setup DEVICE=…` has chosen it; the CPU where
    none is installed.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "cpu"
    return "cpu" if "+cpu" in version else "cuda"
