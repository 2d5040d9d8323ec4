"""Seams: on a CPU the rules on a conversation read its keys and values once, not once a rule.

vLLM's CPU kernel takes requests one by one. Here the suffixes that read the same context are one
product with it, in C++ (`native_attention.py`), and each attends to itself beside (cascade
attention; Ye et al. 2024, https://flashinfer.ai/2024/02/02/cascade-inference.html). A context is
read where the step computed it, or out of the cache where the kernel's layout is known. All else
goes through vLLM's kernel. Remove when vLLM has cascade attention for its CPU backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from ..compiler import CompileError
from ..seam import seam
from .native_attention import NativeAttention, load, takes
from .shared_context import Batch, SharedContext, between, shared_contexts

VECTORS = ("vec", "vec16")  # vLLM's kernels whose cache `from_vectors` reads

logger = init_logger(f"vllm.{__name__}")

# The runner's batch, while the metadata of its step are built.
_batch: ContextVar[Batch | None] = ContextVar("batch", default=None)


@dataclass(frozen=True)
class Readers:
    """The rows of a step that read one context, which lies in these blocks of the cache."""

    context: SharedContext
    blocks: torch.Tensor
    attention: NativeAttention


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
    # For images and embeddings, token ids do not say what is in the cache.
    is_text = not (self.supports_mm_inputs or self.enable_prompt_embeds)
    if current_platform.is_cpu() and scheduled and is_text:
        batch = _batch_of(self.input_batch, scheduled)
    token = _batch.set(batch)
    try:
        return original(self, *args, **kwargs)
    finally:
        _batch.reset(token)


def _batch_of(input_batch: Any, scheduled: dict[str, int]) -> Batch | None:
    """The step's batch; None where there are several block tables."""
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
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.__init__",
    "self kv_cache_spec layer_names vllm_config device",
)
def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Find out what the builder's layers can do, and compile what they need, before any step."""
    original(self, *args, **kwargs)
    self.can_cascade = cascades(self)


def cascades(builder: Any) -> bool:
    """Whether rules attend to what they share in C++. It is faster than vLLM's kernel for vectors,
    not than that for AMX, and reads what the former keeps.
    """
    is_plain = builder.isa in VECTORS and _can_cascade(builder)
    return is_plain and is_native(builder.dtype, builder.head_dim)


def _can_cascade(builder: Any) -> bool:
    """Whether all the builder's layers attend to everything before a token, and to nothing else.
    Builders of other classes make requests of their own for the kernel.
    """
    if type(builder) is not CPUAttentionMetadataBuilder:
        return False
    layers = get_layers_from_vllm_config(builder.vllm_config, Attention, builder.layer_names)
    return bool(layers) and all(_is_plain(layer.impl) for layer in layers.values())


def _is_plain(attention: Any) -> bool:
    return (
        attention.attn_type == AttentionType.DECODER
        and attention.sliding_window == -1
        and not attention.logits_soft_cap
        and attention.alibi_slopes is None
        and attention.sinks is None
        and not attention.is_fp8_kv_cache
        and attention.kv_sharing_target_layer_name is None
    )


def is_native(dtype: torch.dtype, size: int) -> bool:
    """Whether C++ attends for heads of this type and size, which is compiled here."""
    if not takes(dtype, size):
        return False
    try:
        load()
    except CompileError as error:
        logger.warning_once(
            "vllm_alora: every rule reads its conversation itself, which is slower here: %s",
            str(error),
        )
        return False
    return True


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
    if batch is None or not self.can_cascade or metadata.causal is not True:
        return metadata
    contexts = shared_contexts(batch, NativeAttention.worth)
    if self.isa != "vec":  # how its kernel keeps keys and values is not known here
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
    readers = [_readers(batch, context) for context in contexts]
    metadata.cascade = Cascade(readers, runs)
    return metadata


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


def _readers(batch: Batch, context: SharedContext) -> Readers:
    blocks = batch.blocks[context.requests[0], : -(-context.tokens // batch.block_size)]
    attention = NativeAttention.of(batch, context.requests)
    return Readers(context, torch.from_numpy(blocks.astype(np.int64)), attention)


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
        context = _context_of(readers, key, value, kv_cache)
        readers.attention.attend(query, key, value, context, self.scale, output)
    return output


def _context_of(
    readers: Readers, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The context's keys and values, [tokens, heads, size] each."""
    tokens, first = readers.context.tokens, readers.context.computed_at
    if first is not None:
        return key[first : first + tokens], value[first : first + tokens]
    keys, values = from_vectors(kv_cache[readers.blocks])
    return keys[:tokens], values[:tokens]


def from_vectors(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, [tokens, heads, size], out of blocks [blocks, heads, tokens, 2 * size] that
    vLLM's vector kernel keeps: keys by columns, values by rows (csrc/cpu/cpu_attn_vec.hpp).
    """
    count, heads, tokens, twice = blocks.shape
    keys, values = blocks.flatten(2).unflatten(2, (2, -1)).unbind(2)
    keys = keys.view(count, heads, twice // 2, tokens).permute(0, 3, 1, 2)
    values = values.view(count, heads, tokens, twice // 2).transpose(1, 2)
    return keys.flatten(0, 1).contiguous(), values.flatten(0, 1).contiguous()
