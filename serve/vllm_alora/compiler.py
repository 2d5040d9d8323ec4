"""The plugin's C++ for CPUs, compiled on the machine that runs it, once, and kept.

Compiling takes seconds and needs nothing but a C++ compiler (GCC 9 or later, or clang), which
PyTorch's own needs too. Knows nothing of vLLM.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMPILE_S = 120  # at most


class CompileError(RuntimeError):
    """A source was not compiled. Its text says why."""


@functools.cache
def compiled(source: Path, functions: tuple[str, ...], arguments: tuple[type, ...]) -> ctypes.CDLL:
    """The compiled source, from the cache of earlier processes if it has it. Its `functions` take
    these `arguments` and return nothing. Raises CompileError.
    """
    try:
        command = shlex.split(os.environ.get("CXX", "g++"))
    except ValueError as error:
        raise CompileError(f"CXX={os.environ['CXX']} is not a command: {error}") from error
    if not command or shutil.which(command[0]) is None:
        raise CompileError("there is no C++ compiler: install g++, or name one by CXX")
    machine = "-march=native"
    if platform.machine() in {"aarch64", "arm64"}:
        machine = "-mcpu=native"
    command += ["-std=c++17", "-O3", machine, "-fopenmp", "-shared", "-fPIC"]
    try:
        library = _library(command, source)
        if not library.exists():
            _compile(command, source, library)
        try:
            return _loaded(library, functions, arguments)
        except (OSError, AttributeError):  # broken, or of another system with the same home
            _compile(command, source, library)
            return _loaded(library, functions, arguments)
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{command[0]} failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, AttributeError, RuntimeError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]}: {error}") from error


def _library(command: Sequence[str], source: Path) -> Path:
    """The compiled source's file, by compiler and processor: machines may share a home folder."""
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    parts = [source.read_text(encoding="utf-8"), *command, version.stdout, *_processor()]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "vllm_alora", f"{source.stem}-{key}.so")


def _loaded(library: Path, functions: tuple[str, ...], arguments: tuple[type, ...]) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library))
    for name in functions:
        function: Any = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


def _compile(command: Sequence[str], source: Path, library: Path) -> None:
    """Compile to `library`, whole or not at all: other processes may do the same."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        compiled_library = Path(scratch, library.name)
        subprocess.run(
            [*command, str(source), "-o", str(compiled_library)],
            check=True,
            capture_output=True,
            text=True,
            timeout=COMPILE_S,
        )
        with compiled_library.open("rb") as file:
            os.fsync(file.fileno())  # half a library would end the process that loads it
        compiled_library.replace(library)


def _processor() -> list[str]:
    """The facts of the processor by which compiled code may differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return [platform.processor()]
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return sorted({line for line in lines if line.startswith(names)})
