"""The short answers about a prompt's blocks are vLLM's own."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_alora
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm_alora.kv.block_counts import (
    connector_finished,
    estimate_cached_tokens,
    num_evictable_blocks,
)
from vllm_alora.kv.partial_block import SharedPartialBlocks

pytestmark = pytest.mark.slow


vllm_alora.register()


def block(ref_cnt: int, hashed_tokens: int | None) -> Any:
    return SimpleNamespace(
        ref_cnt=ref_cnt, is_null=False, block_hash_num_tokens=hashed_tokens, block_id=ref_cnt
    )


@pytest.mark.parametrize("seed", range(5))
def test_as_many_blocks_can_be_evicted_as_vllm_says(seed: int) -> None:
    rng = random.Random(seed)
    blocks = [block(rng.choice((0, 0, 1, 3)), 4) for _ in range(rng.randrange(12))]
    original = FullAttentionManager._get_num_evictable_blocks.__wrapped__  # type: ignore[attr-defined]
    expected = original(FullAttentionManager, blocks)
    assert FullAttentionManager._get_num_evictable_blocks(blocks) == expected
    assert num_evictable_blocks.wrapper(original, FullAttentionManager, blocks) == expected


def test_blocks_of_a_window_may_be_null_and_are_counted_by_vllm() -> None:
    null = block(0, None)
    null.is_null = True
    assert SlidingWindowManager._get_num_evictable_blocks([null, block(0, 4)]) == 1


def vllms_estimate(self: Any, request: Any) -> int:
    """The walk that vLLM makes, over one group of full attention."""
    tokens = 0
    for blocks in self.get_blocks(request.request_id).blocks:
        for each_block in blocks:
            tokens = max(tokens, each_block.block_hash_num_tokens or 0)
    return tokens


@pytest.mark.parametrize("hashed", [(), (4, 8, 12), (4, 8, None), (None, None)])
def test_as_many_tokens_are_cached_as_vllm_says(hashed: tuple[int | None, ...]) -> None:
    groups = ([block(1, tokens) for tokens in hashed],)
    manager = SimpleNamespace(
        coordinator=SimpleNamespace(
            single_type_managers=[FullAttentionManager.__new__(FullAttentionManager)]
        ),
        get_blocks=lambda _: SimpleNamespace(blocks=groups if hashed else ()),
    )
    request = SimpleNamespace(request_id="request")
    counted = estimate_cached_tokens.wrapper(pytest.fail, manager, request)
    assert counted == vllms_estimate(manager, request)


def test_another_kind_of_cache_is_left_to_vllm() -> None:
    manager = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=[object()]))
    assert estimate_cached_tokens.wrapper(lambda *_: 7, manager, None) == 7
    scheduler = SimpleNamespace(connector=object())
    assert connector_finished.wrapper(lambda *_: (True, {}), scheduler, None) == (True, {})


def test_a_finished_request_leaves_the_partial_blocks_without_its_blocks_ids() -> None:
    shared = SharedPartialBlocks(None, 4, 2, in_step_above=0)
    leader = SimpleNamespace(request_id="leader")
    shared._leaders["partial"] = leader  # type: ignore[index]
    finished = connector_finished.wrapper(pytest.fail, SimpleNamespace(connector=shared), leader)
    assert finished == (False, None) and not shared._leaders
