"""Which KV blocks requests share, find and get, by vLLM's own requests, hasher and cache: with the
plugin's short ways the blocks are vLLM's, and those before an activation point are the base's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_alora
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm_alora.handover import ActivatedRequest
from vllm_alora.kv.allocation import allocate_slots
from vllm_alora.shared_prompt import Prefix, SharedPrompt

pytestmark = pytest.mark.slow

BLOCK = 4
PROMPT = list(range(20))  # five full blocks
EXTERNAL = "num_external_computed_tokens"

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


def hashes(
    lora: LoRARequest | None,
    cache_salt: str | None = None,
    prompt: Any = PROMPT,
    hasher: Any = None,
) -> list[Any]:
    return request_of(0, prompt, hasher or new_hasher(), lora, cache_salt).block_hashes


def alora(
    name: str = "rule", adapter_id: int = 1, start: int = 12, content: str = "abc"
) -> ActivatedRequest:
    return ActivatedRequest(name, adapter_id, f"/{name}", activation_start=start, content=content)


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (alora(), None, 3),
        # A block that the activation point cuts is not shared.
        (alora(start=13), None, 3),
        (alora(start=15), None, 3),
        (alora(start=11), None, 2),
        (alora(start=13), alora(start=15), 3),  # nor with one that is cut elsewhere
        (alora(start=0), None, 0),
        (LoRARequest("lora", 1, "/lora"), None, 0),
        (alora("one", 1), alora("other", 2), 3),
        (alora("one", 1, start=8), alora("other", 2, start=16), 2),
        # Other weights under the same name and path are another adapter.
        (alora(content="old"), alora(content="new"), 3),
        (alora(start=0, content="old"), alora(start=0, content="new"), 0),
        (alora(), alora(), 5),
    ],
)
def test_blocks_before_the_activation_point_are_the_bases_and_no_others(
    one: LoRARequest, other: LoRARequest | None, shared: int
) -> None:
    for salt in (None, "tenant"):
        pairs = zip(hashes(one, salt), hashes(other, salt), strict=True)
        assert [left == right for left, right in pairs] == [number < shared for number in range(5)]
    assert not set(hashes(one, "tenant")) & set(hashes(one))


def test_a_conversation_is_hashed_and_looked_up_once_for_all_adapters(
    monkeypatch: MonkeyPatch,
) -> None:
    hashed, looked_up = list[Any](), list[bytes]()
    cache = cache_of(64)
    found = cache.block_pool.get_cached_block

    def counted(block: Any) -> bytes:
        hashed.append(block)
        return sha256(block)

    def counted_look(name: Any, groups: Any) -> Any:
        looked_up.append(name)
        return found(name, groups)

    monkeypatch.setattr(cache.block_pool, "get_cached_block", counted_look)
    hasher = new_hasher(counted)
    for number in range(10):
        request = request_of(number, PROMPT, hasher, alora(f"rule {number}", 1 + number, start=13))
        computed, tokens, _ = cache.get_computed_blocks(request)
        assert tokens == (12 if number else 0)
        assert cache.allocate_slots(request, len(PROMPT) - tokens, tokens, computed) is not None
    # The first finds none, the second three; each other one asks for the one behind.
    assert len(looked_up) == 1 + 4 + 8
    # The base's blocks once; the one that is cut and the one behind it, by every adapter.
    assert len(hashed) == 3 + 10 * 2
    hashed.clear()
    hashes(alora(start=25), prompt=[*PROMPT[:13], *range(50, 65)], hasher=hasher)
    assert len(hashed) == 4  # a conversation that grew: what is new


asked = st.tuples(
    st.sampled_from([None, "lora", "one", "other"]),
    st.integers(0, 24),  # activation point
    st.sampled_from([None, "tenant"]),
    st.lists(st.integers(0, 1), min_size=1, max_size=6),  # which of two blocks stands where
    st.integers(0, BLOCK),  # tokens beyond whole blocks
    st.booleans(),  # whether it says that it shares these blocks
)


@given(st.lists(asked, min_size=2, max_size=8))
def test_whatever_was_asked_before_keys_are_of_the_request_alone(requests: list[Any]) -> None:
    hasher, prefixes = new_hasher(), dict[tuple[int, ...], Prefix]()
    for name, start, salt, blocks, beyond, is_shared in requests:
        prompt: Any = tokens_of(blocks, [7] * beyond)
        if is_shared:
            prefix = prefixes.setdefault(tuple(blocks), Prefix(tokens_of(blocks)))
            prompt = SharedPrompt(prefix, [7] * beyond)
        lora: LoRARequest | None = alora(name, start=start)
        if name in (None, "lora"):
            lora = name and LoRARequest("lora", 3, "/lora")
        alone = hashes(lora, salt, [*prompt])
        assert hashes(lora, salt, prompt, hasher) == alone


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
        self._assert_same_blocks_are_found(theirs)
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

    def _assert_same_blocks_are_found(self, request: Any) -> None:
        """And that as many of them can be evicted as vLLM says."""
        plain = UnitaryKVCacheCoordinator.find_longest_cache_hit.__wrapped__  # type: ignore[attr-defined]
        plain_count = FullAttentionManager._get_num_evictable_blocks.__wrapped__  # type: ignore[attr-defined]
        most = request.num_tokens - 1
        (wanted,), length, _ = plain(self._ours.coordinator, request.block_hashes, most)
        computed, tokens, _ = self._ours.get_computed_blocks(request)
        assert tokens == length
        assert list(computed.blocks[0]) == list(wanted)
        evictable = FullAttentionManager._get_num_evictable_blocks(wanted)
        assert evictable == plain_count(FullAttentionManager, wanted)

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
            plain_estimate = KVCacheManager.estimate_cached_tokens.__wrapped__  # type: ignore[attr-defined]
            cached_tokens = self._ours.estimate_cached_tokens(mine)
            assert cached_tokens == plain_estimate(self._vllms, theirs)
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
    """Those that are found, and those that are given."""
    caches = TwoCaches(watermark)
    for number, asked in enumerate(requests):
        caches.admit(number, asked)


def read(original: Any, **changed: Any) -> tuple[Any, Any, Any]:
    """A cache, a request that begins with another's three blocks, and what it is given."""
    cache, hasher = cache_of(16), new_hasher()
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


def test_what_is_not_plain_is_left_to_vllm_and_the_step_is_noted() -> None:
    vllms = SimpleNamespace()
    for changed in (
        {"num_lookahead_tokens": 2},
        {"delay_cache_blocks": True},
        {"num_encoder_tokens": 1},
        {"an argument of a later version": 1},
    ):
        _, reader, blocks = read(lambda *_, **__: vllms, **changed)
        assert blocks is vllms
        assert (reader.computed_after_step, reader.tokens_in_step) == (3 * BLOCK + 1, 1)


def test_blocks_of_a_window_that_can_be_evicted_are_counted_by_vllm() -> None:
    blocks = [SimpleNamespace(ref_cnt=0, is_null=is_null) for is_null in (True, False)]
    assert SlidingWindowManager._get_num_evictable_blocks(blocks) == 1
