"""A request whose conversation others hold gets the blocks that vLLM would give it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import vllm_alora
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm_alora.kv.allocation import allocate_slots

from tests.serve.vllm_alora.kv.caches import BLOCK, cache_of, request_of

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def patched() -> None:
    vllm_alora.register()
    kv_cache_utils.init_none_hash(sha256)


def state(cache: KVCacheManager, ids: list[str]) -> Any:
    """Everything that a later allocation depends on."""
    pool = cache.block_pool
    blocks = [(block.ref_cnt, block.block_hash) for block in pool.blocks]
    held = [cache.get_block_ids(request_id) for request_id in ids]
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    cached = dict(cache.coordinator.single_type_managers[0].num_cached_block)
    return blocks, held, free, cached


def arguments(cache: KVCacheManager, request: Any, elsewhere: int) -> dict[str, Any]:
    """As the scheduler gives them, where `elsewhere` tokens behind the cached ones come from a KV
    connector.
    """
    computed, tokens, _ = cache.get_computed_blocks(request)
    external = min(elsewhere, request.num_tokens - tokens - 1)
    return {
        "num_new_tokens": request.num_tokens - tokens - external,
        "num_new_computed_tokens": tokens,
        "new_computed_blocks": computed,
        "num_lookahead_tokens": 0,
        "num_external_computed_tokens": external,
        "delay_cache_blocks": False,
        "skip_zeroing_group_ids": (),
        "num_encoder_tokens": 0,
        "full_sequence_must_fit": True,
        "reserved_blocks": 0,
        "has_scheduled_reqs": True,
    }


asked = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=5),  # blocks' worth of tokens
    st.integers(0, BLOCK + 2),  # tokens behind them
    st.integers(0, BLOCK - 1),  # of which so many come from elsewhere
    st.booleans(),  # whether the request stays
)


@settings(deadline=None)
@given(st.lists(asked, min_size=2, max_size=12))
def test_whatever_is_asked_the_blocks_are_vllms(requests: list[Any]) -> None:
    plain = KVCacheManager.allocate_slots.__wrapped__  # type: ignore[attr-defined]
    ours, vllms = cache_of(16), cache_of(16)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    held: list[tuple[Any, Any]] = []
    for number, (blocks, behind, elsewhere, stays) in enumerate(requests):
        prompt = [7 + number] * behind
        for block in reversed(blocks):
            prompt = [*range(100 * block, 100 * block + BLOCK), *prompt]
        mine, theirs = (request_of(number, prompt, hasher) for _ in range(2))
        given_mine = arguments(ours, mine, elsewhere)
        given_theirs = arguments(vllms, theirs, elsewhere)
        got = ours.allocate_slots(mine, given_mine.pop("num_new_tokens"), **given_mine)
        wanted = plain(vllms, theirs, given_theirs.pop("num_new_tokens"), **given_theirs)
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert got.get_block_ids() == wanted.get_block_ids()
            assert mine.computed_after_step == mine.num_tokens
        ids = [*(request.request_id for request, _ in held), str(number)]
        assert state(ours, ids) == state(vllms, ids)
        held.append((mine, theirs))
        leaving = []
        if got is None:
            leaving, held = held, []
        elif not stays:
            leaving = [held.pop()]
        for one, other in leaving:
            ours.free(one)
            vllms.free(other)


def test_who_begins_with_blocks_that_others_hold_is_not_vllms_business() -> None:
    cache = cache_of(16)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    prompt = [*range(3 * BLOCK)]
    leader = request_of(1, [*prompt, 1], hasher)
    given = arguments(cache, leader, 0)
    assert cache.allocate_slots(leader, given.pop("num_new_tokens"), **given) is not None
    reader = request_of(2, [*prompt, 2], hasher)
    given = arguments(cache, reader, 0)
    new_tokens = given.pop("num_new_tokens")
    blocks = allocate_slots.wrapper(pytest.fail, cache, reader, new_tokens, **given)
    assert len(blocks.get_block_ids()[0]) == 1
    assert cache.get_block_ids("2")[0][:3] == cache.get_block_ids("1")[0][:3]


@pytest.mark.parametrize(
    "changed",
    [
        {"num_lookahead_tokens": 2},
        {"delay_cache_blocks": True},
        {"num_encoder_tokens": 1},
        {"an argument of a later version": 1},
    ],
)
def test_what_is_not_plain_is_left_to_vllm(changed: dict[str, Any]) -> None:
    cache = cache_of(16)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    prompt = [*range(3 * BLOCK)]
    leader = request_of(1, [*prompt, 1], hasher)
    given = arguments(cache, leader, 0)
    cache.allocate_slots(leader, given.pop("num_new_tokens"), **given)
    reader = request_of(2, [*prompt, 2], hasher)
    given = arguments(cache, reader, 0) | changed
    vllms = SimpleNamespace()
    new_tokens = given.pop("num_new_tokens")
    assert (
        allocate_slots.wrapper(lambda *_, **__: vllms, cache, reader, new_tokens, **given) is vllms
    )
