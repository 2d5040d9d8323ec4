"""Seam: blocks before the activation point are the base model's.

vLLM puts the adapter into the key of every KV block of its requests. An aLoRA's blocks hold exactly
the base model's K/V if they end at or before the activation point. So these blocks get the base's
key, and all adapters and the base share them. Every other block keeps the adapter's key. This key
also says where the activation point cuts the block. It names the content of the weights too,
because name and path stay the same when an adapter is trained again.

The base's blocks of a conversation are hashed once, not once for every adapter. Remove when vLLM
serves aLoRA itself and keys blocks by adapter content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..handover import ActivatedRequest
from ..seam import seam
from ..shared_prompt import Prefix, prefix_of


@seam(
    "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
    "request start_token_idx end_token_idx start_mm_idx",
)
def extra_keys(
    original: Callable[..., Any],
    request: Any,
    start_token_idx: int,
    end_token_idx: int,
    start_mm_idx: int,
) -> tuple[tuple[Any, ...] | None, int]:
    """The block's extra keys. The adapter is one of them only behind its activation point."""
    keys, next_mm_idx = original(request, start_token_idx, end_token_idx, start_mm_idx)
    lora = request.lora_request
    if not isinstance(lora, ActivatedRequest):
        return keys, next_mm_idx
    base_keys = tuple(key for key in keys if key[0] != "lora")
    if end_token_idx <= lora.activation_start:
        return base_keys or None, next_mm_idx
    # Two prompts may have the same tokens in this block and another activation point.
    base_tokens = max(0, lora.activation_start - start_token_idx)
    adapter_key = ("lora", lora.lora_name, lora.lora_path, lora.content, base_tokens)
    return (adapter_key, *base_keys), next_mm_idx


@dataclass(frozen=True)
class Hashed:
    """The base's blocks at the start of a prompt, and their hashes."""

    token_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    cache_salt: str | None = None
    prefix: Prefix | None = None  # which the prompt names as shared

    def begins(self, request: Any, base_tokens: int) -> bool:
        """Whether the base computes these blocks at the start of the request too."""
        length = len(self.token_ids)
        if not 0 < length <= base_tokens or self.cache_salt != request.cache_salt:
            return False
        prefix = prefix_of(request.prompt_token_ids)
        if prefix is not None and prefix is self.prefix and length <= len(prefix.token_ids):
            return True
        return self.token_ids == request.all_token_ids[:length]  # type: ignore[no-any-return]


@seam("vllm.v1.core.kv_cache_utils:get_request_block_hasher", "hash_block_size caching_hash_fn")
def request_block_hasher(
    original: Callable[..., Any], hash_block_size: int, caching_hash_fn: Any
) -> Callable[[Any], list[bytes]]:
    """vLLM's hasher. It does not hash the base's blocks of the last conversation again."""
    hasher = original(hash_block_size, caching_hash_fn)
    last = Hashed()

    def hash_blocks(request: Any) -> list[bytes]:
        nonlocal last
        if request.block_hashes or request.mm_features or request.prompt_embeds is not None:
            return hasher(request)  # type: ignore[no-any-return]
        base_tokens = _base_tokens(request)
        previous = last  # an engine in a process of its own hashes in two threads
        if previous.begins(request, base_tokens):
            request.block_hashes.extend(previous.hashes)
        new_hashes: list[bytes] = hasher(request)
        blocks = base_tokens // hash_block_size
        if request.lora_request is not None and blocks > len(request.block_hashes):
            token_ids = request.all_token_ids[: blocks * hash_block_size]
            hashes = [*request.block_hashes, *new_hashes][:blocks]
            prefix = prefix_of(request.prompt_token_ids)
            last = Hashed(token_ids, hashes, request.cache_salt, prefix)
        return new_hashes

    return hash_blocks


def _base_tokens(request: Any) -> int:
    """The base model computes so many of the request's first tokens."""
    lora = request.lora_request
    if lora is None:
        return int(request.num_tokens)
    if isinstance(lora, ActivatedRequest):
        return lora.activation_start
    return 0
