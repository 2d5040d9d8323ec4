"""Seam: a request gets the blocks that others hold already, and its own few, briefly.

A hundred rules on one conversation begin with the same cached blocks, which the first of them
holds. vLLM's allocation of each is a tenth of what a rule costs; here they are given directly, and
everything else goes vLLM's way. It is also noted how far the planned step computes a request, which
the scheduler tells only later (`partial_block`). Remove when vLLM allocates blocks for requests
that share them together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from ..seam import seam

# Arguments of vLLM's that say no more than what follows from the request.
PLAIN_ARGUMENTS = frozenset(
    [
        "num_new_computed_tokens",
        "new_computed_blocks",
        "num_external_computed_tokens",
        "full_sequence_must_fit",
        "reserved_blocks",
        "has_scheduled_reqs",
    ]
)


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
    blocks = None
    if not args and num_new_tokens > 0 and has_plain_blocks(self):
        blocks = _behind_held_blocks(self, request, num_new_tokens, kwargs)
    if blocks is None:
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


def _behind_held_blocks(
    kv_cache_manager: Any, request: Any, new_tokens: int, arguments: dict[str, Any]
) -> Any:
    """vLLM's blocks for a request that begins with blocks of others; None for any other one."""
    passed = {name for name, value in arguments.items() if value}
    hit = arguments.get("new_computed_blocks")
    if hit is None or not hit.blocks[0] or not passed <= PLAIN_ARGUMENTS:
        return None
    manager, pool = (
        kv_cache_manager.coordinator.single_type_managers[0],
        kv_cache_manager.block_pool,
    )
    held, size = hit.blocks[0], manager.block_size
    is_new = request.num_computed_tokens == 0 and request.request_id not in manager.req_to_blocks
    if not is_new or arguments["num_new_computed_tokens"] != len(held) * size:
        return None
    if 0 in [block.ref_cnt for block in held]:  # it would leave the queue of the free ones
        return None
    external = arguments.get("num_external_computed_tokens", 0)
    most_tokens = max(request.num_tokens, len(held) * size + external + new_tokens)
    spare = kv_cache_manager.watermark_blocks + arguments.get("reserved_blocks", 0)
    if cdiv(most_tokens, size) - len(held) + spare > pool.get_num_free_blocks():
        return None
    blocks = _given(kv_cache_manager, request, held, external, new_tokens)
    reported = blocks[cdiv(len(held) * size + external, size) :]
    return kv_cache_manager.create_kv_cache_blocks((reported,))


def _given(
    kv_cache_manager: Any, request: Any, held: list[Any], external: int, new_tokens: int
) -> list[Any]:
    """All blocks of a request: the `held` ones, `external` tokens, and `new_tokens` to compute."""
    manager, pool = (
        kv_cache_manager.coordinator.single_type_managers[0],
        kv_cache_manager.block_pool,
    )
    end = len(held) * manager.block_size + external + new_tokens
    for block in held:
        block.ref_cnt += 1
    new_blocks = pool.get_new_blocks(cdiv(end, manager.block_size) - len(held))
    blocks = [*held, *new_blocks]
    manager.req_to_blocks[request.request_id] = blocks
    manager.num_cached_block[request.request_id] = len(held)
    finished = min(end, request.num_tokens)
    if finished // manager.block_size > len(held):
        kv_cache_manager.coordinator.cache_blocks(request, finished)
    return blocks


class BehindHeldBlocks:
    """Blocks for requests that begin with the same tokens, `end` of them, as one that holds blocks
    for these; all are computed to their ends at once. `held_count`: how many whole blocks they
    share.
    """

    def __init__(self, kv_cache_manager: Any, holder: Any, end: int) -> None:
        self._kv_cache_manager = kv_cache_manager
        manager = kv_cache_manager.coordinator.single_type_managers[0]
        self._size = manager.block_size
        self._end = end
        self.held_count, self._external = divmod(end, self._size)
        self._held = manager.req_to_blocks[holder.request_id][: self.held_count]
        self._held_ids = [block.block_id for block in self._held]

    def are_there_for(self, request: Any) -> bool:
        wanted = cdiv(request.num_tokens, self._size) - self.held_count
        spare = self._kv_cache_manager.watermark_blocks
        free = self._kv_cache_manager.block_pool.get_num_free_blocks()
        return bool(wanted + spare <= free)

    def give(self, request: Any) -> list[int]:
        """The ids of all blocks of the request, which has none yet."""
        new_tokens = request.num_tokens - self._end
        blocks = _given(self._kv_cache_manager, request, self._held, self._external, new_tokens)
        return self._held_ids + [block.block_id for block in blocks[self.held_count :]]
