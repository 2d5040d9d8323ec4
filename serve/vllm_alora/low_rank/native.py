"""The low-rank products of a CPU in C++ (`products.cpp`), compiled once a machine.

PyTorch has no product of many small matrices that reads each where it lies: it copies those that
are not side by side, and in bfloat16 pads three rows to a tile. Compiling takes a second and needs
nothing but a C++ compiler, which PyTorch's own compiler needs too. Knows nothing of vLLM.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

SOURCE = Path(__file__).with_name("products.cpp")
FUNCTIONS = {torch.float32: "add_float32", torch.bfloat16: "add_bfloat16"}
# A thread takes so many tokens of one adapter at once.
PIECE_TOKENS = 64
COMPILE_S = 120  # at most

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (
    *(_POINTER, _COUNT, _POINTER, _COUNT),  # y, x and their rows' strides
    *(_COUNT, _COUNT),  # inputs, largest rank
    *(_POINTER, _COUNT, _POINTER, _COUNT, _POINTER),  # slices, pieces, tokens
    ctypes.c_int32,  # threads
)


class CompileError(RuntimeError):
    """The products were not compiled. Its text says why."""


class _Slice(ctypes.Structure):
    """`Slice` of products.cpp."""

    _fields_ = (
        ("a", _POINTER),
        ("b", _POINTER),
        ("ranks", _POINTER),
        ("first", _COUNT),
        ("width", _COUNT),
    )


class Pieces(NamedTuple):
    """A step's tokens by adapter.

    `table` [pieces, 3], int32: slot, where its tokens begin in `tokens` [all of them], and how many
    they are.
    """

    table: np.ndarray
    tokens: np.ndarray


def pieces_of(tokens_of_slot: dict[int, list[int]]) -> Pieces:
    """Every slot's tokens, cut so that threads can share them out."""
    table: list[tuple[int, int, int]] = []
    tokens: list[int] = []
    for slot, own in tokens_of_slot.items():
        for start in range(0, len(own), PIECE_TOKENS):
            count = min(PIECE_TOKENS, len(own) - start)
            table.append((slot, len(tokens) + start, count))
        tokens += own
    return Pieces(np.array(table, np.int32), np.array(tokens, np.int32))


class NativeLayer:
    """A layer's adapters: A [slots, 1, rank, in] and B [slots, 1, out, rank] for each slice of its
    outputs, B by columns, and the rank of each slot's adapter in each slice, [slices, slots].

    What it is made of must stay where it is. Raises CompileError where nothing can be compiled, and
    ValueError where the weights lie otherwise.
    """

    def __init__(
        self,
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        outputs: Sequence[int],
        ranks: np.ndarray,
    ) -> None:
        if not all(part.is_contiguous() for part in a) or not all(
            part.mT.is_contiguous() for part in b
        ):
            raise ValueError("vllm_alora: adapters must lie in one piece, B by columns")
        self._function = getattr(load(), FUNCTIONS[a[0].dtype])
        self._kept = (a, b, ranks)
        self._max_rank, self._inputs = a[0].shape[-2:]
        self._slices = (_Slice * len(outputs))()
        first = 0
        for index, width in enumerate(outputs):
            self._slices[index] = _Slice(
                a[index].data_ptr(), b[index].data_ptr(), ranks[index].ctypes.data, first, width
            )
            first += width

    def add(self, y: torch.Tensor, x: torch.Tensor, pieces: Pieces) -> None:
        """y += x A B on the pieces' tokens, in place; y [tokens, out] and x [tokens, in] with their
        rows each in one piece. Raises ValueError if they are not.
        """
        if y.stride(1) != 1 or x.stride(1) != 1:
            raise ValueError("vllm_alora: rows must lie in one piece")
        self._function(
            *(y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0)),
            *(self._inputs, self._max_rank, self._slices, len(self._slices)),
            *(pieces.table.ctypes.data, len(pieces.table), pieces.tokens.ctypes.data),
            torch.get_num_threads(),
        )


@functools.cache
def load() -> ctypes.CDLL:
    """The compiled products, from the cache of earlier processes if it has them.

    Raises CompileError.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CompileError("there is no C++ compiler (g++, or what CXX names)")
    machine = "-mcpu=native" if platform.machine() in {"aarch64", "arm64"} else "-march=native"
    flags = ("-O3", machine, "-fopenmp", "-shared", "-fPIC")
    # The same home may be that of several machines.
    parts = [SOURCE.read_text(encoding="utf-8"), compiler, *flags, _processor()]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    library = _cache_folder() / f"products-{key}.so"
    if not library.exists():
        _compile([compiler, *flags, str(SOURCE)], library)
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise CompileError(f"{library} cannot be loaded: {error}") from error
    for name in FUNCTIONS.values():
        function: Any = getattr(loaded, name)
        function.argtypes, function.restype = _ARGUMENTS, None
    return loaded


def _compile(command: Sequence[str], library: Path) -> None:
    """Whole or not at all: other processes may do the same."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch, library.name)
            subprocess.run(
                [*command, "-o", str(made)],
                check=True,
                capture_output=True,
                text=True,
                timeout=COMPILE_S,
            )
            made.replace(library)
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{command[0]} failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]}: {error}") from error


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "vllm_alora"


def _processor() -> str:
    """What code for this machine may differ by."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return "\n".join(named[:2])
