"""Seams: on a CPU the rules on a conversation read its keys and values once, not once a rule.

vLLM's CPU kernel takes requests one by one: a suffix of three tokens is a product of three rows
with a conversation's keys, a hundred times. Here the suffixes that read the same context are one
product with it, then each attends to itself, and the two are put together by their softmaxes' sums
(cascade attention; Ye et al. 2024, https://flashinfer.ai/2024/02/02/cascade-inference.html). The
other requests of the step go through the kernel as before. A context that the step computes is read
where it was computed; one of an earlier step out of the cache, where the kernel's layout is known.
Can go when vLLM has cascade attention for its CPU backend.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType

from ..low_rank.sgmv import as_index
from ..seam import seam
from .shared_context import Batch, SharedContext, between, shared_contexts

TILE_ROWS = 48  # of requests that attend to themselves side by side: a product worth its call

# The runner's batch, while the metadata of its step are built.
_batch: ContextVar[Batch | None] = ContextVar("batch", default=None)


@dataclass(frozen=True)
class Readers:
    """The rows of a step that read one context, and their requests in tiles.

    `rows` [rows]. A tile is some requests side by side, each with as many rows as the longest has:
    `tiles` [tiles, tile rows], where what is short is filled up with rows that nobody asked for;
    `mask` (`own_rows`), which of them a row of a tile attends to; `unpadded` [rows], where each of
    the rows lies in the flattened tiles. `alone` and `mask_alone` are tiles of one request each.
    """

    context: SharedContext
    blocks: torch.Tensor
    rows: slice | torch.Tensor
    tiles: torch.Tensor
    mask: torch.Tensor
    alone: torch.Tensor
    mask_alone: torch.Tensor
    unpadded: slice | torch.Tensor


@dataclass(frozen=True)
class Run:
    """Neighbouring requests that go through vLLM's kernel: their rows, and their metadata."""

    rows: slice
    metadata: Any


@dataclass(frozen=True)
class Cascade:
    """A step's attention in two parts: by context, and by request."""

    readers: list[Readers]
    runs: list[Run]


@seam(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
    "self num_tokens num_reqs max_query_len num_tokens_padded num_reqs_padded ubatch_slices "
    "logits_indices max_num_sampled_tokens use_spec_decode for_cudagraph_capture "
    "num_scheduled_tokens slot_mappings",
)
def build_attention_metadata(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Lend the step's batch to the builders of metadata."""
    scheduled = kwargs.get("num_scheduled_tokens")
    batch = None
    if current_platform.is_cpu() and scheduled:
        batch = _batch_of(self.input_batch, scheduled)
    token = _batch.set(batch)
    try:
        return original(self, *args, **kwargs)
    finally:
        _batch.reset(token)


def _batch_of(input_batch: Any, scheduled: dict[str, int]) -> Batch | None:
    """None where there are several block tables."""
    tables = input_batch.block_table.block_tables
    if len(tables) != 1:
        return None
    count = input_batch.num_reqs
    starts = vars(input_batch).get("activation_starts", {})
    base_tokens = np.fromiter((starts.get(name, 0) for name in input_batch.req_ids), np.int64)
    is_base = input_batch.request_lora_mapping[:count] == 0
    return Batch(
        tables[0].get_numpy_array()[:count],
        input_batch.token_ids_cpu[:count],
        input_batch.num_computed_tokens_cpu[:count],
        np.fromiter((scheduled[name] for name in input_batch.req_ids), np.int64),
        np.where(is_base, input_batch.num_prompt_tokens[:count], base_tokens),
        tables[0].block_size,
    )


@seam(
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build",
    "self common_prefix_len common_attn_metadata fast_build",
)
def build(
    original: Callable[..., Any],
    self: Any,
    common_prefix_len: int,
    common_attn_metadata: Any,
    fast_build: bool = False,
) -> Any:
    """vLLM's metadata of the step; with a cascade, if enough requests have a context in common."""
    metadata = original(self, common_prefix_len, common_attn_metadata, fast_build)
    batch = _batch.get()
    if batch is None or not _can_cascade(self):
        return metadata
    contexts = shared_contexts(batch)
    if not _can_read_cache(self):
        contexts = [context for context in contexts if context.computed_at is not None]
    if not contexts:
        return metadata
    reading = [request for context in contexts for request in context.requests]
    runs = []
    for run in between(reading, len(batch.computed)):
        common = _part(common_attn_metadata, run)
        rows = slice(
            int(batch.first_rows[run.start]),
            int(batch.first_rows[run[-1]] + batch.scheduled[run[-1]]),
        )
        runs.append(Run(rows, original(self, 0, common, fast_build)))
    sharing = self.num_heads // self.num_kv_heads
    readers = [_readers(batch, context, sharing, self.dtype) for context in contexts]
    metadata.cascade = Cascade(readers, runs)
    return metadata


def _can_cascade(builder: Any) -> bool:
    """Whether all layers of the builder attend to everything before a token, and to nothing else.

    Asked once a builder.
    """
    can_cascade: bool | None = vars(builder).get("can_cascade")
    if can_cascade is None:
        layers = get_layers_from_vllm_config(builder.vllm_config, Attention, builder.layer_names)
        can_cascade = bool(layers) and all(_is_plain(layer.impl) for layer in layers.values())
        builder.can_cascade = can_cascade
    return can_cascade


def _is_plain(attention: Any) -> bool:
    return (
        attention.attn_type == AttentionType.DECODER
        and attention.sliding_window == -1
        and not attention.logits_soft_cap
        and attention.alibi_slopes is None
        and attention.sinks is None
        and not attention.is_fp8_kv_cache
    )


def _can_read_cache(builder: Any) -> bool:
    """Whether the layout that the builder's kernel keeps is known here."""
    return builder.isa in LAYOUTS


def _part(common: Any, run: range) -> Any:
    """vLLM's metadata of neighbouring requests, as if they were the whole step."""
    starts = common.query_start_loc[run.start : run.stop + 1]
    starts_cpu = common.query_start_loc_cpu[run.start : run.stop + 1]
    first, stop = int(starts_cpu[0]), int(starts_cpu[-1])
    seq_lens = common.seq_lens[run.start : run.stop]
    return dataclasses.replace(
        common,
        query_start_loc=starts - first,
        query_start_loc_cpu=starts_cpu - first,
        seq_lens=seq_lens,
        num_reqs=len(run),
        num_actual_tokens=stop - first,
        max_query_len=int(starts_cpu.diff().max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=common.block_table_tensor[run.start : run.stop],
        slot_mapping=common.slot_mapping[first:stop],
    )


def _readers(batch: Batch, context: SharedContext, sharing: int, dtype: torch.dtype) -> Readers:
    requests = np.array(context.requests)
    lengths = batch.scheduled[requests]
    longest = int(lengths.max())
    in_tile = max(1, TILE_ROWS // longest)
    spare = -len(requests) % in_tile
    offsets = np.arange(longest)
    last = lengths[:, None] - 1
    padded = batch.first_rows[requests][:, None] + np.minimum(offsets, last)
    filled = np.pad(padded, ((0, spare), (0, 0)), "edge")
    unpadded = np.flatnonzero(offsets <= last)
    blocks = batch.blocks[requests[0], : -(-context.tokens // batch.block_size)]
    return Readers(
        context=context,
        blocks=torch.from_numpy(blocks.astype(np.int64)),
        rows=as_index(padded.ravel()[unpadded].tolist()),
        tiles=torch.from_numpy(filled.reshape(-1, in_tile * longest)),
        mask=own_rows(in_tile, longest, sharing, dtype),
        alone=torch.from_numpy(padded),
        mask_alone=own_rows(1, longest, sharing, dtype),
        unpadded=as_index(unpadded.tolist()),
    )


@functools.cache
def own_rows(requests: int, rows: int, sharing: int, dtype: torch.dtype) -> torch.Tensor:
    """A mask of a tile of so many requests: a row attends to those of its request up to itself.

    0 or minus infinity, [sharing * tile rows, tile rows], for `sharing` heads of one head of keys.
    """
    attends = torch.block_diag(*[torch.ones(rows, rows).tril()] * requests).bool()
    mask = torch.zeros(attends.shape, dtype=dtype).masked_fill(~attends, -torch.inf)
    return mask.repeat(sharing, 1)


@seam(
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
    "self layer query key value kv_cache attn_metadata output output_scale output_block_scale",
)
def forward(
    original: Callable[..., torch.Tensor],
    self: Any,
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """A layer's attention: vLLM's, or by context and by request where the step has a cascade."""
    cascade: Cascade | None = getattr(attn_metadata, "cascade", None)
    if cascade is None:
        return original(
            self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )
    for run in cascade.runs:
        rows = run.rows
        original(
            self, layer, query[rows], key[rows], value[rows], kv_cache, run.metadata, output[rows]
        )
    for readers in cascade.readers:
        context = _context_of(readers, key, value, kv_cache, layer.isa)
        output[readers.rows] = attend(query, key, value, context, readers, self.scale)
    return output


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    readers: Readers,
    scale: float,
) -> torch.Tensor:
    """What the readers' rows attend to: the context's keys and values, and their own requests'.

    `query` [rows of the step, heads, size], `key` and `value` [rows of the step, heads of keys,
    size], the context's [tokens, heads of keys, size]. Returns [the readers' rows, heads, size] in
    the query's type: rows that are not a slice of the output take no other.
    """
    rows, sums = _attention(
        query[readers.rows][None], context[0][None], context[1][None], None, scale
    )
    tiles, alone = readers.tiles, readers.alone
    suffix, suffix_sums = _attention(query[tiles], key[tiles], value[tiles], readers.mask, scale)
    if not suffix.isfinite().all():  # a mask lets one request's NaN through to its neighbours
        suffix, suffix_sums = _attention(
            query[alone], key[alone], value[alone], readers.mask_alone, scale
        )
    suffix, suffix_sums = (
        suffix.flatten(0, 1)[readers.unpadded],
        suffix_sums.flatten(0, 1)[readers.unpadded],
    )
    # Two softmaxes of one row are one softmax by the share of each in the sum of exponentials.
    share = torch.sigmoid(sums[0] - suffix_sums)[..., None]
    return torch.lerp(suffix.float(), rows[0].float(), share).to(query.dtype)


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


def _context_of(
    readers: Readers, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The context's keys and values, [tokens, heads, size] each."""
    tokens, first = readers.context.tokens, readers.context.computed_at
    if first is not None:
        return key[first : first + tokens], value[first : first + tokens]
    keys, values = LAYOUTS[isa](kv_cache[readers.blocks])
    return keys[:tokens], values[:tokens]


def _from_vectors(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, [tokens, heads, size], out of blocks [blocks, heads, tokens, 2 * size] that
    vLLM's vector kernel keeps: keys by columns, values by rows (csrc/cpu/cpu_attn_vec.hpp).
    """
    count, heads, tokens, twice = blocks.shape
    keys, values = blocks.flatten(2).unflatten(2, (2, -1)).unbind(2)
    keys = keys.view(count, heads, twice // 2, tokens).permute(0, 3, 1, 2)
    values = values.view(count, heads, tokens, twice // 2).transpose(1, 2)
    return keys.flatten(0, 1), values.flatten(0, 1)


def _from_tiles(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same out of blocks that vLLM's AMX kernel keeps, as tiles of pairs: keys [16 tokens,
    pairs of numbers, 16, 2], values [16 numbers, pairs of tokens, 16, 2]
    (csrc/cpu/cpu_attn_amx.hpp).
    """
    count, heads, tokens, twice = blocks.shape
    size = twice // 2
    keys, values = blocks.flatten(2).unflatten(2, (2, -1)).unbind(2)
    keys = keys.view(count, heads, tokens // 16, size // 2, 16, 2)
    keys = keys.permute(0, 2, 4, 1, 3, 5).reshape(count * tokens, heads, size)
    values = values.view(count, heads, size // 16, tokens // 2, 16, 2)
    values = values.permute(0, 3, 5, 1, 2, 4).reshape(count * tokens, heads, size)
    return keys, values


# By the name of the kernel's instructions.
LAYOUTS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "vec": _from_vectors,
    "amx": _from_tiles,
}
