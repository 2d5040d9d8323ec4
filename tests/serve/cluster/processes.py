"""The processes of replicas that a test has started. Tests only."""

from __future__ import annotations

import contextlib
import os

import psutil


def replica_processes() -> list[int]:
    """The processes of replicas below this one."""
    pids: list[int] = []
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ServeReplica" in " ".join(process.cmdline()):
                pids.append(process.pid)
    return sorted(pids)
