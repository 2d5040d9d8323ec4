"""Attention to a context that many rows share, by PyTorch's kernel for CPUs.

All rows are one product with the context; each attends to its own request in tiles of requests side
by side; the two are put together by their softmaxes' sums. Knows nothing of vLLM.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ..low_rank.sgmv import as_index
from ..token_map import Ints
from .shared_context import Batch, Worth

TILE_ROWS = 48  # of requests that attend to themselves side by side: a product worth its call


@dataclass(frozen=True)
class TiledAttention:
    """The rows of a step that read one context, and their requests in tiles.

    `rows` [rows]: where they lie in the step. A tile is some requests side by side, each with as
    many rows as the longest has, what is short filled up with its own last row: `tiles` [tiles,
    tile rows]. `mask` (`own_rows`): which rows of its tile each of them attends to. `unpadded`
    [rows]: where each of `rows` lies in the flattened tiles. `alone` and `mask_alone` are tiles of
    one request each. With a request of row 10, one of the rows 5 to 7, and two in a tile:

        rows      10  5  6  7
        alone     10 10 10         mask_alone   1 0 0
                   5  6  7                      1 1 0
                                                1 1 1
        tiles     10 10 10  5  6  7             mask: two of these along the diagonal, else 0
        unpadded   0  3  4  5
    """

    worth: ClassVar = Worth(512, 300_000)  # docs/lessons.md

    rows: slice | torch.Tensor
    tiles: torch.Tensor
    mask: torch.Tensor
    alone: torch.Tensor
    mask_alone: torch.Tensor
    unpadded: slice | torch.Tensor

    @classmethod
    def of(
        cls, batch: Batch, requests: tuple[int, ...], sharing: int, dtype: torch.dtype
    ) -> TiledAttention:
        """The rows of these requests of a batch; `sharing` query heads read one key head."""
        lengths = batch.scheduled[list(requests)]
        longest = int(lengths.max())
        in_tile = max(1, TILE_ROWS // longest)
        padded = _padded_rows(batch.first_rows[list(requests)], lengths)
        unpadded = np.flatnonzero(np.arange(longest) < lengths[:, None])
        return cls(
            rows=as_index(padded.ravel()[unpadded].tolist()),
            tiles=torch.from_numpy(_tiles(padded, in_tile)),
            mask=own_rows(in_tile, longest, sharing, dtype),
            alone=torch.from_numpy(padded),
            mask_alone=own_rows(1, longest, sharing, dtype),
            unpadded=as_index(unpadded.tolist()),
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """Write the rows' attention to `output`, as `NativeAttention.attend`, in any layout."""
        of_context, context_sums = _attention(
            query[self.rows][None], context[0][None], context[1][None], None, scale
        )
        tiles, alone = self.tiles, self.alone
        suffix, suffix_sums = _attention(query[tiles], key[tiles], value[tiles], self.mask, scale)
        if not suffix.isfinite().all():  # a mask lets one request's NaN through to its neighbours
            suffix, suffix_sums = _attention(
                query[alone], key[alone], value[alone], self.mask_alone, scale
            )
        suffix, suffix_sums = (
            suffix.flatten(0, 1)[self.unpadded],
            suffix_sums.flatten(0, 1)[self.unpadded],
        )
        # With the sums of exponentials c of the context and s of the suffix, the softmax over both
        # is (c of_context + s suffix) / (c + s), and c / (c + s) = sigmoid(log c - log s).
        share = torch.sigmoid(context_sums[0] - suffix_sums)[..., None]
        together = torch.lerp(suffix.float(), of_context[0].float(), share)
        output[self.rows] = together.to(query.dtype)  # an index takes no other type


def _padded_rows(first_rows: Ints, lengths: Ints) -> Ints:
    """The rows of requests that begin at `first_rows` [requests] and have `lengths` [requests]:
    [requests, longest], the last row again behind a request's end.
    """
    offsets = np.arange(lengths.max())
    padded: Ints = first_rows[:, None] + np.minimum(offsets, lengths[:, None] - 1)
    return padded


def _tiles(padded: Ints, in_tile: int) -> Ints:
    """[requests, longest] -> [tiles, in_tile * longest], filled up with the last request."""
    requests, longest = padded.shape
    missing = -requests % in_tile
    filled = np.pad(padded, ((0, missing), (0, 0)), "edge")
    return filled.reshape(-1, in_tile * longest)


@functools.cache
def own_rows(requests: int, rows: int, sharing: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask of a tile of `requests`: a row attends to those of its request up to itself. 0 or
    minus infinity, [sharing * tile rows, tile rows], for `sharing` heads of one head of keys.
    """
    attends = torch.block_diag(*[torch.ones(rows, rows).tril()] * requests).bool()
    mask = torch.zeros(attends.shape, dtype=dtype).masked_fill(~attends, -torch.inf)
    return mask.repeat(sharing, 1)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of rows [batch, rows, heads, size] to tokens [batch, tokens, heads of keys, size],
    and the logarithm of each softmax's sum, [batch, rows, heads]. `mask` [sharing * rows, tokens]:
    the `sharing` heads that read one head of keys are rows of one product.
    """
    rows, key_heads = query.shape[1], key.shape[2]
    attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _heads_as_rows(query, key_heads),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        scale=scale,
    )
    return _rows_with_heads(attended, rows), _rows_with_heads(sums, rows)


def _heads_as_rows(query: torch.Tensor, key_heads: int) -> torch.Tensor:
    """[batch, rows, heads, size] -> [batch, heads of keys, sharing * rows, size]."""
    by_key_head = query.unflatten(2, (key_heads, -1))  # batch, rows, heads of keys, sharing, size
    as_rows: torch.Tensor = by_key_head.movedim(1, 3).flatten(2, 3)
    return as_rows


def _rows_with_heads(by_key_head: torch.Tensor, rows: int) -> torch.Tensor:
    """[batch, heads of keys, sharing * rows, ...] -> [batch, rows, heads, ...]."""
    by_sharing = by_key_head.unflatten(2, (-1, rows))  # batch, heads of keys, sharing, rows, ...
    with_heads: torch.Tensor = by_sharing.movedim(3, 1).flatten(2, 3)
    return with_heads
