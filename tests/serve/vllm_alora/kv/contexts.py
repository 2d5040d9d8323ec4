"""Rows that share a context, and what they attend to."""

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


@dataclass(frozen=True)
class Requests:
    """Where requests begin in a step, and how many rows they have."""

    first_rows: Sequence[int]
    lengths: Sequence[int]

    @classmethod
    def side_by_side(cls, count: int, rows: int) -> Requests:
        return cls([number * rows for number in range(count)], [rows] * count)

    @property
    def batch(self) -> Batch:
        """As vLLM's runner has them."""
        count, first_rows = len(self.lengths), np.array(self.first_rows)

        class BatchOfRows(Batch):
            @property
            def first_rows(self) -> Any:
                return first_rows

        blocks, zeros = np.zeros((count, 8), np.int32), np.zeros(count)
        return BatchOfRows(blocks, zeros[:, None], zeros, np.array(self.lengths), zeros, 32)

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(range(len(self.lengths)))


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

    def plainly(self, requests: Requests) -> torch.Tensor:
        """The same by plain softmaxes in float64."""
        output = torch.full(self.query.shape, -1.0, dtype=torch.float64)
        sharing = self.query.shape[1] // self.key.shape[1]
        for first, length in zip(requests.first_rows, requests.lengths, strict=True):
            own = slice(first, first + length)
            keys = torch.cat([self.context[0], self.key[own]]).double()
            values = torch.cat([self.context[1], self.value[own]]).double()
            query = (self.query[own].double() * self.scale).unflatten(1, (-1, sharing))
            scores = torch.einsum("lhsd,thd->hslt", query, keys)
            is_later = torch.ones(length, len(keys)).triu(len(keys) - length + 1).bool()
            weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)
            output[own] = torch.einsum("hslt,thd->lhsd", weights, values).flatten(1, 2)
        return output
