"""Small KV caches of vLLM's own with the plugin's seams, and requests for them. Tests only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import vllm_alora
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK = 4
vllm_alora.register()
kv_cache_utils.init_none_hash(sha256)


def cache_of(blocks: int, *, watermark: float = 0.0) -> KVCacheManager:
    """A cache of `blocks` blocks, one of them vLLM's own; `watermark`: the part that stays free."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return KVCacheManager(KVCacheConfig(blocks, [], groups), 64, BLOCK, BLOCK, watermark=watermark)


def new_hasher(hash_block: Callable[[Any], bytes] = sha256) -> Any:
    return kv_cache_utils.get_request_block_hasher(BLOCK, hash_block)


def request_of(
    number: int,
    prompt: Any,
    hasher: Any,
    lora: LoRARequest | None = None,
    cache_salt: str | None = None,
) -> Request:
    """A request of the id `number`."""
    return Request(
        str(number),
        prompt,
        SamplingParams(max_tokens=1),
        None,
        lora_request=lora,
        cache_salt=cache_salt,
        block_hasher=hasher,
    )


def tokens_of(blocks: Sequence[int], behind: Sequence[int] = ()) -> list[int]:
    """Whole blocks of tokens, by their numbers, and tokens behind them."""
    token_ids: list[int] = []
    for block in blocks:
        token_ids += range(100 * block, 100 * block + BLOCK)
    return [*token_ids, *behind]
