"""The machine, without torch: its device, what it is fast at, and how busy others keep it."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Literal

import psutil

Device = Literal["cpu", "cuda"]

CPU_INFO = Path("/proc/cpuinfo")
BUSY_SAMPLE_S = 0.3
MOST_BUSY = 0.5  # cores that others may use before a warning
BFLOAT16_FLAGS = frozenset(["amx_bf16", "avx512_bf16"])  # as Linux names the instructions
INT8_FLAGS = frozenset(["amx_int8", "avx512_vnni", "avx_vnni"])  # others' sums may saturate


def usable_cores() -> set[int]:
    return os.sched_getaffinity(0)


@functools.cache
def installed_device() -> Device:
    """The device that the installed torch was built for; the CPU where none is installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if "+cpu" not in importlib.metadata.version("torch"):
            return "cuda"
    return "cpu"


def missing_for_compiling() -> str | None:
    """What torch's compiler lacks here to call a C++ compiler on Python.h; None if nothing."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"a C++ compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's headers (python3-dev)"
    return None


def multiplies_bfloat16() -> bool:
    return not BFLOAT16_FLAGS.isdisjoint(cpu_info("flags").split())


def is_slow_in_mkl() -> bool:
    """Whether MKL multiplies float32 for PyTorch on a slow path here, as on AMD's CPUs."""
    return cpu_info("vendor_id") == "AuthenticAMD"


@functools.cache
def cpu_info(key: str) -> str:
    """The value that the system gives for `key` of its first core; empty where there is none."""
    if not CPU_INFO.is_file():
        return ""
    value = re.search(rf"^{key}\s*:(.*)$", CPU_INFO.read_text(encoding="utf-8"), re.MULTILINE)
    if value is None:
        return ""
    return value[1].strip()


def warn_if_busy(consequence: str) -> None:
    """Say on stderr, in a line that ends in `consequence`, if other processes use these cores."""
    cores = usable_cores()
    percents: list[float] = []
    with contextlib.suppress(OSError):  # no /proc/stat
        percents = psutil.cpu_percent(interval=BUSY_SAMPLE_S, percpu=True)  # while this one waits
    busy = sum(percent for core, percent in enumerate(percents) if core in cores) / 100
    if busy > MOST_BUSY:
        busy_part = f"{busy:.1f} of {len(cores)} cores"
        print(f"warning: other processes keep {busy_part} busy: {consequence}", file=sys.stderr)
