"""Which cores this process may use: fewer than the machine has where an affinity says so."""

from __future__ import annotations

import os


def usable_cores() -> set[int]:
    """The numbers of the cores that this process may use: all of them where the system does not
    say.
    """
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
