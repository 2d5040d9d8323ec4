"""Which kind of device this environment computes on, and what it is fast at. Knows nothing of torch
or vLLM, and imports neither. What it was told is kept: every result that is looked up asks again.
"""

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


@functools.cache
def installed_device() -> Device:
    """The device that the installed torch was built for, as `make setup DEVICE=…` has chosen it;
    the CPU where none is installed.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "cpu"
    return "cpu" if "+cpu" in version else "cuda"


def missing_for_compiling() -> str | None:
    """What torch's compiler lacks on this machine to compile a model for the CPU; None if nothing.

    It calls a C++ compiler, CXX or g++, on code that includes Python.h.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"a C++ compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's headers (python3-dev)"
    return None


def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for products of bfloat16: AMX, or AVX-512 BF16.

    False where the system does not tell.
    """
    return not BFLOAT16_FLAGS.isdisjoint(_cpu_info("flags").split())


def is_slow_in_mkl() -> bool:
    """Whether MKL, with which PyTorch multiplies float32, takes a slow path on this CPU: on one of
    AMD's.

    False where the system does not tell.
    """
    return _cpu_info("vendor_id") == "AuthenticAMD"


@functools.cache
def _cpu_info(key: str) -> str:
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
