"""A request whose conversation others hold gets the blocks that vLLM would give it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import RequestStatus
from vllm_alora.kv.allocation import allocate_slots

from tests.serve.vllm_alora.kv.caches import BLOCK, cache_of, new_hasher, request_of, tokens_of

pytestmark = pytest.mark.slow

EXTERNAL = "num_external_computed_tokens"


def state(cache: KVCacheManager, ids: list[str]) -> Any:
    """Everything that a later allocation depends on."""
    pool = cache.block_pool
    blocks = [(block.ref_cnt, block.block_hash) for block in pool.blocks]
    held = [cache.get_block_ids(request_id) for request_id in ids]
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    cached = dict(cache.coordinator.single_type_managers[0].num_cached_block)
    return blocks, held, free, cached


@dataclass(frozen=True)
class Allocation:
    """What a request asks of the cache, and how the scheduler asks for it."""

    blocks: list[int]  # blocks' worth of tokens, by number
    behind: int = 0  # tokens behind them, its own
    elsewhere: int = 0  # tokens behind the cached ones that a KV connector brings
    chunk: int = 100  # tokens that the step has room for
    reserved: int = 0  # blocks for prefills under way
    has_scheduled: bool = True
    stays: bool = True

    def prompt(self, number: int) -> list[int]:
        """The token ids of the request of this number."""
        return tokens_of(self.blocks, [7 + number] * self.behind)

    def arguments(self, cache: KVCacheManager, request: Any) -> dict[str, Any]:
        """As the scheduler gives them."""
        computed, tokens, _ = cache.get_computed_blocks(request)
        external = min(self.elsewhere, request.num_tokens - tokens - 1)
        return {
            "num_new_tokens": min(request.num_tokens - tokens - external, self.chunk),
            "num_new_computed_tokens": tokens,
            "new_computed_blocks": computed,
            "num_lookahead_tokens": 0,
            EXTERNAL: external,
            "delay_cache_blocks": False,
            "skip_zeroing_group_ids": (),
            "num_encoder_tokens": 0,
            "full_sequence_must_fit": True,
            "reserved_blocks": self.reserved,
            "has_scheduled_reqs": self.has_scheduled,
        }


allocations = st.builds(
    Allocation,
    blocks=st.lists(st.integers(0, 1), min_size=1, max_size=5),
    behind=st.integers(0, BLOCK + 2),
    elsewhere=st.integers(0, BLOCK - 1),
    chunk=st.just(100) | st.integers(1, 2 * BLOCK),
    reserved=st.just(0) | st.integers(1, 3),
    has_scheduled=st.booleans(),
    stays=st.booleans(),
)


class TwoCaches:
    """Our cache and vLLM's, which are asked for the same and must be the same ever after."""

    def __init__(self, watermark: float) -> None:
        self._ours = cache_of(16, watermark=watermark)
        self._vllms = cache_of(16, watermark=watermark)
        self._held: list[tuple[Any, Any]] = []

    def admit(self, number: int, asked: Allocation) -> None:
        """A request that waits, in the step that admits it; then its rest in another."""
        hasher = new_hasher()
        mine, theirs = (request_of(number, asked.prompt(number), hasher) for _ in range(2))
        given = asked.arguments(self._ours, mine), asked.arguments(self._vllms, theirs)
        self._held.append((mine, theirs))
        is_admitted = self._allocate(mine, theirs, *given)
        rest = mine.num_tokens - getattr(mine, "computed_after_step", 0)
        if is_admitted and rest:
            for request in (mine, theirs):
                request.num_computed_tokens = mine.computed_after_step
                request.status = RequestStatus.RUNNING
            given_rest = {"num_new_tokens": rest, "num_lookahead_tokens": 0}
            is_admitted = self._allocate(mine, theirs, given_rest, given_rest)
        if not is_admitted:
            while self._held:
                self._free()
        elif not asked.stays:
            self._free()

    def _allocate(
        self, mine: Any, theirs: Any, given_mine: dict[str, Any], given_theirs: dict[str, Any]
    ) -> bool:
        """Whether there is room."""
        plain = KVCacheManager.allocate_slots.__wrapped__  # type: ignore[attr-defined]
        computed = mine.num_computed_tokens
        got = self._ours.allocate_slots(mine, **given_mine)
        wanted = plain(self._vllms, theirs, **given_theirs)
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert got.get_block_ids() == wanted.get_block_ids()
            assert mine.tokens_in_step == given_mine["num_new_tokens"]
            for name in ("num_new_tokens", "num_new_computed_tokens", EXTERNAL):
                computed += given_mine.get(name, 0)
            assert mine.computed_after_step == computed
        ids = [request.request_id for request, _ in self._held]
        assert state(self._ours, ids) == state(self._vllms, ids)
        return got is not None

    def _free(self) -> None:
        mine, theirs = self._held.pop()
        self._ours.free(mine)
        self._vllms.free(theirs)


@settings(deadline=None)
@given(st.lists(allocations, min_size=2, max_size=12), st.sampled_from([0.0, 0.2]))
def test_whatever_is_asked_blocks_are_vllms(requests: list[Allocation], watermark: float) -> None:
    caches = TwoCaches(watermark)
    for number, asked in enumerate(requests):
        caches.admit(number, asked)


def read(original: Any, *, gives_held_blocks: bool = True, **changed: Any) -> tuple[Any, Any, Any]:
    """A cache, a request that begins with another's three blocks, and what it is given."""
    cache, hasher = cache_of(16), new_hasher()
    cache.gives_held_blocks = gives_held_blocks  # type: ignore[attr-defined]
    asked = Allocation([0, 1, 2], behind=1)
    leader, reader = (request_of(number, asked.prompt(number), hasher) for number in (1, 2))
    given = asked.arguments(cache, leader)
    assert cache.allocate_slots(leader, given.pop("num_new_tokens"), **given) is not None
    given = asked.arguments(cache, reader) | changed
    new_tokens = given.pop("num_new_tokens")
    return cache, reader, allocate_slots.wrapper(original, cache, reader, new_tokens, **given)


def test_who_begins_with_blocks_that_others_hold_is_not_vllms_business() -> None:
    cache, _, blocks = read(pytest.fail)
    assert len(blocks.get_block_ids()[0]) == 1
    assert cache.get_block_ids("2")[0][:3] == cache.get_block_ids("1")[0][:3]


@pytest.mark.parametrize(
    "changed",
    [
        {"gives_held_blocks": False},
        {"num_lookahead_tokens": 2},
        {"delay_cache_blocks": True},
        {"num_encoder_tokens": 1},
        {"an argument of a later version": 1},
    ],
)
def test_what_is_not_plain_is_left_to_vllm_and_the_step_is_noted(changed: dict[str, Any]) -> None:
    vllms = SimpleNamespace()
    _, reader, blocks = read(lambda *_, **__: vllms, **changed)
    assert blocks is vllms
    assert (reader.computed_after_step, reader.tokens_in_step) == (3 * BLOCK + 1, 1)
