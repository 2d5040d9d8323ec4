"""Seam: it is noted how far the planned step computes a request, which the scheduler tells only
later (`partial_block`). And which blocks followers get: those that their leader holds, and their
own few. Remove when vLLM allocates blocks for requests that share them together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from ..seam import seam


@seam(
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
    "self request num_new_tokens num_new_computed_tokens new_computed_blocks num_lookahead_tokens "
    "num_external_computed_tokens delay_cache_blocks num_encoder_tokens full_sequence_must_fit "
    "reserved_blocks has_scheduled_reqs skip_zeroing_group_ids",
)
def allocate_slots(
    original: Callable[..., Any],
    self: Any,
    request: Any,
    num_new_tokens: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The request's new blocks; None if there are too few."""
    blocks = original(self, request, num_new_tokens, *args, **kwargs)
    if blocks is not None:
        cached = kwargs.get("num_new_computed_tokens", 0)
        cached += kwargs.get("num_external_computed_tokens", 0)
        request.computed_after_step = request.num_computed_tokens + cached + num_new_tokens
        request.tokens_in_step = num_new_tokens
    return blocks


def has_plain_blocks(kv_cache_manager: Any) -> bool:
    """Whether blocks can be given directly: all are one group's, of full attention, and cached."""
    is_plain: bool | None = vars(kv_cache_manager).get("has_plain_blocks")
    if is_plain is None:
        coordinator = kv_cache_manager.coordinator
        is_plain = (
            type(coordinator) is UnitaryKVCacheCoordinator
            and type(coordinator.single_type_managers[0]) is FullAttentionManager
            and not coordinator.single_type_managers[0].records_new_block_ids
            and kv_cache_manager.enable_caching
            and not kv_cache_manager.retained_hit_group_ids
            and kv_cache_manager.block_pool.metrics_collector is None
        )
        kv_cache_manager.has_plain_blocks = is_plain
    return is_plain


class BehindHeldBlocks:
    """Blocks for requests that begin with the same tokens, `end` of them, as one that holds blocks
    for these; all are computed to their ends at once. `held_count`: how many whole blocks they
    share.
    """

    def __init__(self, kv_cache_manager: Any, holder: Any, end: int) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._manager = kv_cache_manager.coordinator.single_type_managers[0]
        self._size = self._manager.block_size
        self.held_count = end // self._size
        self._held = self._manager.req_to_blocks[holder.request_id][: self.held_count]
        self._held_ids = [block.block_id for block in self._held]

    def are_there_for(self, request: Any) -> bool:
        wanted = cdiv(request.num_tokens, self._size) - self.held_count
        spare = self._kv_cache_manager.watermark_blocks
        free = self._kv_cache_manager.block_pool.get_num_free_blocks()
        return bool(wanted + spare <= free)

    def give(self, request: Any) -> list[int]:
        """The ids of all blocks of the request, which has none yet."""
        for block in self._held:
            block.ref_cnt += 1
        wanted = cdiv(request.num_tokens, self._size) - self.held_count
        blocks = self._kv_cache_manager.block_pool.get_new_blocks(wanted)
        self._manager.req_to_blocks[request.request_id] = [*self._held, *blocks]
        self._manager.num_cached_block[request.request_id] = self.held_count
        if request.num_tokens // self._size > self.held_count:
            self._kv_cache_manager.coordinator.cache_blocks(request, request.num_tokens)
        return self._held_ids + [block.block_id for block in blocks]
