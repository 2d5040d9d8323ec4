"""Attention to a context that many rows share, on a CPU in C++ (`attention.cpp`).

In bfloat16 on a processor with AMX vLLM's kernel is faster, one request after the other. Knows
nothing of vLLM.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ..compiler import compiled
from .shared_context import Batch, Worth

SOURCE = Path(__file__).with_name("attention.cpp")
FUNCTIONS = {torch.float32: "attend_float32", torch.bfloat16: "attend_bfloat16"}
SIZE_STEP, LARGEST_SIZE = 64, 1024  # of heads

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_TENSORS = ("output", "query", "key", "value", "context_key", "context_value")


class _Arguments(ctypes.Structure):
    """`Arguments` of attention.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in _TENSORS),
        *((f"{name}_stride", _COUNT) for name in _TENSORS),
        ("rows", _POINTER),
        ("first_rows", _POINTER),
        *((name, _COUNT) for name in ("row_count", "tokens", "key_heads", "sharing", "size")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


def load() -> ctypes.CDLL:
    return compiled(SOURCE, tuple(FUNCTIONS.values()), (_POINTER,))


def takes(dtype: torch.dtype, size: int) -> bool:
    """Whether heads of this type and size are for C++, where vLLM does without AMX's tiles."""
    return dtype in FUNCTIONS and size % SIZE_STEP == 0 and size <= LARGEST_SIZE


@dataclass(frozen=True)
class NativeAttention:
    """The rows that read one context, and where their requests' own begin: [rows], int32."""

    worth: ClassVar = Worth(128, 75_000)  # docs/lessons.md

    rows: npt.NDArray[np.int32]
    first_rows: npt.NDArray[np.int32]

    @classmethod
    def of(cls, batch: Batch, requests: tuple[int, ...]) -> NativeAttention:
        """The rows of these requests of a batch."""
        lengths = batch.scheduled[list(requests)]
        first_rows = np.repeat(batch.first_rows[list(requests)], lengths)
        begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
        rows = first_rows + np.arange(len(first_rows)) - begins
        return cls(rows.astype(np.int32), first_rows.astype(np.int32))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """Write to `output` the rows' attention to the context and to their own requests' rows: all
        [rows of the step, heads, size], the context [tokens, heads of keys, size]. What is read is
        copied where it lies otherwise. Raises ValueError for tensors that do not fit each other.
        """
        read = [_side_by_side(tensor) for tensor in (query, key, value, *context)]
        tensors = (output, *read)
        self._check(tensors)
        arguments = _Arguments(
            *(tensor.data_ptr() for tensor in tensors),
            *(tensor.stride(0) for tensor in tensors),
            *(self.rows.ctypes.data, self.first_rows.ctypes.data, len(self.rows)),
            *(len(context[0]), key.shape[1], query.shape[1] // key.shape[1], query.shape[2]),
            *(scale, torch.get_num_threads()),
        )
        function = getattr(load(), FUNCTIONS[query.dtype])
        function(ctypes.addressof(arguments))

    def _check(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Raise ValueError where the kernel would read or write memory that is not the tensors'."""
        output, query, key, value, context_key, context_value = tensors
        heads, size = query.shape[1:]
        fits = (
            output.shape[1:] == (heads, size)
            and heads % key.shape[1] == 0
            and all(part.shape[1:] == (key.shape[1], size) for part in tensors[2:])
            and len(context_key) == len(context_value)
            and int(self.rows.max()) < min(len(part) for part in (output, query, key, value))
            and all(part.dtype == query.dtype for part in tensors)
            and size % SIZE_STEP == 0
            and size <= LARGEST_SIZE
        )
        if not fits or _side_by_side(output) is not output:
            shapes = ", ".join(f"{tuple(part.shape)} by {part.stride()}" for part in tensors)
            raise ValueError(f"vllm_alora: no attention to a shared context of these: {shapes}")


def _side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor [rows, heads, size] with the heads of a row side by side."""
    if tensor.stride()[1:] == (tensor.shape[2], 1):
        return tensor
    return tensor.contiguous()
