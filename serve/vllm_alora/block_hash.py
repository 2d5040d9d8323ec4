"""Seam: blocks before the activation point are the base model's.

vLLM puts the adapter into the key of every KV block of its requests. For an aLoRA the blocks that end at or before its
activation point hold exactly the base model's K/V: they get the base's key, and all adapters and the base share them.
A block that the activation point cuts, and every later one, keeps the adapter's key; that also says where it is cut, and names the
content of the weights, because name and path stay the same when an adapter is trained again.
Can go when vLLM serves aLoRA itself and keys blocks by adapter content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .activation import ActivatedRequest
from .seam import seam


@seam(
    "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
    "request start_token_idx end_token_idx start_mm_idx",
)
def extra_keys(
    original: Callable[..., Any], request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[tuple[Any, ...] | None, int]:
    """vLLM's extra keys of the block, the adapter's left out before its activation point and completed after it."""
    keys, next_mm_idx = original(request, start_token_idx, end_token_idx, start_mm_idx)
    lora = request.lora_request
    if not isinstance(lora, ActivatedRequest):
        return keys, next_mm_idx
    others = tuple(key for key in keys if key[0] != "lora")
    if end_token_idx <= lora.activation_start:
        return others or None, next_mm_idx
    # Where it is cut: the same tokens may be cut elsewhere, if the invocation that counts ends in the next block.
    base_tokens = max(0, lora.activation_start - start_token_idx)
    return (("lora", lora.lora_name, lora.lora_path, lora.content, base_tokens), *others), next_mm_idx
