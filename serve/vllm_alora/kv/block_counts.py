"""Seams: what the scheduler asks about all blocks of a prompt, asked briefly.

vLLM walks through every block of every request: how many are in the cache, and which ids they have
for a KV connector. A hundred rules on a long conversation have a hundred times the same blocks. The
answers are vLLM's own. Remove when vLLM asks once for blocks that requests share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from ..seam import seam
from .partial_block import SharedPartialBlocks


@seam("vllm.v1.core.kv_cache_manager:KVCacheManager.estimate_cached_tokens", "self request")
def estimate_cached_tokens(original: Callable[..., int], self: Any, request: Any) -> int:
    """How many of the request's tokens are in the prefix cache: up to its last block that is. A
    block's name says how many tokens end with it, so the last named one has most.
    """
    managers = self.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
        return original(self, request)
    for blocks in self.get_blocks(request.request_id).blocks:  # of one group, or of none yet
        for block in reversed(blocks):
            if block.block_hash_num_tokens:
                return int(block.block_hash_num_tokens)
    return 0


@seam("vllm.v1.core.sched.scheduler:Scheduler._connector_finished", "self request")
def connector_finished(
    original: Callable[..., Any], self: Any, request: Any
) -> tuple[bool, dict[str, Any] | None]:
    """The partial blocks' connector has no use for the ids of a finished request's blocks."""
    if isinstance(self.connector, SharedPartialBlocks):
        return self.connector.request_finished(request, [])
    return original(self, request)  # type: ignore[no-any-return]
