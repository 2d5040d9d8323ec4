"""Small KV caches of vLLM's own, and requests for them. Tests only."""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK = 4


def cache_of(blocks: int, *, watermark: float = 0.0) -> KVCacheManager:
    """A cache of `blocks` KV blocks, one of which vLLM keeps for itself. `watermark`: the part of
    them that stays free where a request is admitted beside others.
    """
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return KVCacheManager(KVCacheConfig(blocks, [], groups), 64, BLOCK, BLOCK, watermark=watermark)


def request_of(
    number: int, prompt: list[int], hasher: Any, lora: LoRARequest | None = None
) -> Request:
    """A request of the id `number`."""
    return Request(
        str(number),
        prompt,
        SamplingParams(max_tokens=1),
        None,
        lora_request=lora,
        block_hasher=hasher,
    )
