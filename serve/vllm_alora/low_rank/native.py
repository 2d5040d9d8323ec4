"""The low-rank products of a CPU in C++ (`products.cpp`).

PyTorch has no product of many small matrices that reads each where it lies: it copies those that
are not side by side, and in bfloat16 pads three rows to a tile. Knows nothing of vLLM.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ..compiler import compiled

SOURCE = Path(__file__).with_name("products.cpp")
FUNCTIONS = {torch.float32: "add_float32", torch.bfloat16: "add_bfloat16"}

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (
    *(_POINTER, _COUNT, _POINTER, _COUNT),  # y, x and their rows' strides
    *(_COUNT, _COUNT),  # inputs, largest rank
    *(_POINTER, _COUNT, _POINTER, _COUNT, _POINTER),  # slices, pieces, tokens
    ctypes.c_int32,  # threads
)


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
    """A step's tokens by adapter. `table` [pieces, 3], int32: slot, where its tokens begin in
    `tokens` [all of them], and how many they are. `last`: the largest token.
    """

    table: np.ndarray
    tokens: np.ndarray
    last: int


def pieces_of(tokens_of_slot: dict[int, list[int]]) -> Pieces:
    """Every slot's tokens, which a thread takes at once."""
    table: list[tuple[int, int, int]] = []
    tokens: list[int] = []
    for slot, slot_tokens in tokens_of_slot.items():
        table.append((slot, len(tokens), len(slot_tokens)))
        tokens += slot_tokens
    return Pieces(np.array(table, np.int32), np.array(tokens, np.int32), max(tokens))


class NativeLayer:
    """A layer's adapters: A [slots, 1, rank, in] and B [slots, 1, out, rank] for each slice of its
    outputs, B by columns, and the rank of each slot's adapter in each slice, [slices, slots]. What
    it is made of must stay where it is. Raises CompileError where nothing can be compiled, and
    ValueError where the weights have other shapes or lie otherwise.
    """

    def __init__(
        self,
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        outputs: Sequence[int],
        ranks: np.ndarray,
    ) -> None:
        self._function = getattr(load(), FUNCTIONS[a[0].dtype])
        self._keeps_alive = (a, b, ranks)
        slots, _, self._max_rank, self._inputs = a[0].shape
        self._width = sum(outputs)
        self._slices = (_Slice * len(outputs))()
        first = 0
        for index, width in enumerate(outputs):
            columns = b[index].mT
            shapes = a[index].shape, columns.shape
            if shapes != (a[0].shape, (slots, 1, self._max_rank, width)):
                raise ValueError(f"vllm_alora: adapters of other shapes than their layer: {shapes}")
            if not a[index].is_contiguous() or not columns.is_contiguous():
                raise ValueError("vllm_alora: adapters must lie in one piece, B by columns")
            own_ranks = ranks[index].ctypes.data
            pointers = a[index].data_ptr(), columns.data_ptr(), own_ranks
            self._slices[index] = _Slice(*pointers, first, width)
            first += width

    def add(self, y: torch.Tensor, x: torch.Tensor, pieces: Pieces) -> None:
        """y += x A B on the pieces' tokens, in place; y [tokens, out] and x [tokens, in]. Raises
        ValueError if they have other sizes, or a row of them does not lie in one piece.
        """
        widths = x.shape[1], y.shape[1]
        if widths != (self._inputs, self._width) or pieces.last >= min(len(x), len(y)):
            sizes = f"x {tuple(x.shape)}, y {tuple(y.shape)}, token {pieces.last}"
            raise ValueError(f"vllm_alora: not the rows of the step or the layer: {sizes}")
        if y.stride(1) != 1 or x.stride(1) != 1:
            raise ValueError("vllm_alora: rows must lie in one piece")
        self._function(
            *(y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0)),
            *(self._inputs, self._max_rank, self._slices, len(self._slices)),
            *(pieces.table.ctypes.data, len(pieces.table), pieces.tokens.ctypes.data),
            torch.get_num_threads(),
        )


def load() -> ctypes.CDLL:
    return compiled(SOURCE, tuple(FUNCTIONS.values()), _ARGUMENTS)
