"""Which kind of device this environment computes on, and what it is fast at, without torch."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Literal

Device = Literal["cpu", "cuda"]

CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = frozenset(["amx_bf16", "avx512_bf16"])  # as Linux names the instructions


def usable_cores() -> set[int]:
    """The numbers of the cores that this process may use."""
    return os.sched_getaffinity(0)


@functools.cache
def installed_device() -> Device:
    """The device that the installed torch was built for; the CPU where none is installed."""
    try:
        return "cpu" if "+cpu" in importlib.metadata.version("torch") else "cuda"
    except importlib.metadata.PackageNotFoundError:
        return "cpu"


def missing_for_compiling() -> str | None:
    """What torch's compiler, which calls a C++ compiler on code that includes Python.h, lacks on
    this machine; None if nothing.
    """
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
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
