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
from .shared_context import Batch, Worth

TILE_ROWS = 48  # of requests that attend to themselves side by side: a product worth its call


@dataclass(frozen=True)
class TiledAttention:
    """The rows of a step that read one context, and their requests in tiles.

    `rows` [rows]. A tile is some requests side by side, each with as many rows as the longest has:
    `tiles` [tiles, tile rows], where what is short is filled up with rows that nobody asked for;
    `mask` (`own_rows`), which of them a row of a tile attends to; `unpadded` [rows], where each of
    the rows lies in the flattened tiles. `alone` and `mask_alone` are tiles of one request each.
    """

    worth: ClassVar = Worth(512, 300_000)  # docs/log/serving.md

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
        first_rows = batch.first_rows[list(requests)]
        lengths = batch.scheduled[list(requests)]
        longest = int(lengths.max())
        in_tile = max(1, TILE_ROWS // longest)
        spare = -len(requests) % in_tile
        offsets = np.arange(longest)
        last = lengths[:, None] - 1
        padded = first_rows[:, None] + np.minimum(offsets, last)
        filled = np.pad(padded, ((0, spare), (0, 0)), "edge")
        unpadded = np.flatnonzero(offsets <= last)
        return cls(
            rows=as_index(padded.ravel()[unpadded].tolist()),
            tiles=torch.from_numpy(filled.reshape(-1, in_tile * longest)),
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
        rows, sums = _attention(
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
        # Two softmaxes of one row are one softmax by the share of each in the sum of exponentials.
        share = torch.sigmoid(sums[0] - suffix_sums)[..., None]
        together = torch.lerp(suffix.float(), rows[0].float(), share)
        output[self.rows] = together.to(query.dtype)  # an index takes no other type


@functools.cache
def own_rows(requests: int, rows: int, sharing: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask of a tile of `requests`: a row attends to those of its request up to itself.

    0 or minus infinity, [sharing * tile rows, tile rows], for `sharing` heads of one head of keys.
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
    `mask` [sharing * rows, tokens] where `sharing` heads read one head of keys, or all of them.

    Returns [batch, rows, heads, size], and the logarithm of each softmax's sum, [batch, rows,
    heads]. The heads that read one head of keys are rows of one product.
    """
    key_heads, sharing = key.shape[2], query.shape[2] // key.shape[2]
    by_key_head = query.unflatten(2, (key_heads, sharing)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        by_key_head, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, scale=scale
    )
    rows = (sharing, query.shape[1])
    attended = attended.unflatten(2, rows).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return attended, sums.unflatten(2, rows).permute(0, 3, 1, 2).flatten(2, 3)
