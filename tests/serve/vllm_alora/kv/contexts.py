"""Rows that share a context, and what they attend to, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm_alora.kv.shared_context import Batch

HEADS, KEY_HEADS, SIZE = 6, 2, 64


def threads_of(*counts: int) -> Iterator[int]:
    """Compute with so many threads, one number after the other."""
    before = torch.get_num_threads()
    try:
        for count in counts:
            torch.set_num_threads(count)
            yield count
    finally:
        torch.set_num_threads(before)


# Where requests begin in a step, and how many rows they have.
STEPS = {
    "side by side": ([2, 5, 8, 11], [3, 3, 3, 3]),
    "apart, of several lengths": ([9, 0, 20], [4, 1, 7]),
    "several tiles": ([number * 3 for number in range(40)], [3] * 40),
    "longer than a tile": ([0, 60], [60, 60]),
}


def batch_of(first_rows: Sequence[int], lengths: Sequence[int]) -> Batch:
    """Requests that begin at these rows of a step and compute so many tokens each."""

    class BatchOfRows(Batch):
        @property
        def first_rows(self) -> Any:
            return np.array(first_rows)

    count = len(lengths)
    return BatchOfRows(
        np.zeros((count, 8), np.int32),
        np.zeros((count, 1)),
        np.zeros(count),
        np.array(lengths),
        np.zeros(count),
        32,
    )


def assert_attention(
    attention: Any, step: Step, first_rows: Sequence[int], lengths: Sequence[int], tolerance: float
) -> None:
    """Of the requests' rows, and nothing of others is written."""
    attended, expected = step.attend(attention), step.row_by_row(first_rows, lengths)
    torch.testing.assert_close(attended.double(), expected, atol=tolerance, rtol=tolerance)


@dataclass
class Step:
    """Random tensors of a step's rows, and of a context that some of them share."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    context: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def random(
        cls,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
        *,
        heads: int = HEADS,
        key_heads: int = KEY_HEADS,
        size: int = SIZE,
    ) -> Step:
        torch.manual_seed(tokens)
        # As vLLM's layers give them: parts of one product.
        parts = torch.randn(rows, heads + 2 * key_heads, size).to(dtype)
        query, key, value = parts.split([heads, key_heads, key_heads], dim=1)
        context = torch.randn(2, tokens, key_heads, size).to(dtype)
        return cls(query, key, value, (context[0], context[1]))

    @property
    def scale(self) -> float:
        return float(self.query.shape[2] ** -0.5)

    def attend(self, attention: Any) -> torch.Tensor:
        """What the rows of the attention attend to; minus one in all other rows."""
        rows, *shape = self.query.shape
        output = torch.full((rows + 3, *shape), -1.0, dtype=self.query.dtype)  # vLLM's is padded
        attention.attend(self.query, self.key, self.value, self.context, self.scale, output)
        assert (output[rows:] == -1).all()
        return output[:rows]

    def row_by_row(self, first_rows: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """The same by plain softmaxes in float64."""
        output = torch.full(self.query.shape, -1.0, dtype=torch.float64)
        for first, length in zip(first_rows, lengths, strict=True):
            for row in range(first, first + length):
                keys = torch.cat([self.context[0], self.key[first : row + 1]])
                values = torch.cat([self.context[1], self.value[first : row + 1]])
                output[row] = _attended(self.query[row], keys, values, self.scale)
        return output


def _attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """One row [heads, size] to tokens [tokens, heads of keys, size]."""
    sharing = query.shape[0] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(sharing, 1) for part in (keys, values))
    weights = torch.einsum("hd,thd->ht", query.double() * scale, keys).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, values)
