"""Which KV blocks requests share, by vLLM's own requests, hasher and cache: those before an
activation point are the base's. And what is noted and counted of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import vllm_alora
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm_alora.handover import ActivatedRequest
from vllm_alora.shared_prompt import Prefix, SharedPrompt

pytestmark = pytest.mark.slow

BLOCK = 4
PROMPT = list(range(20))  # five full blocks

vllm_alora.register()
kv_cache_utils.init_none_hash(sha256)


def cache_of(blocks: int) -> KVCacheManager:
    """A cache of `blocks` blocks, one of them vLLM's own."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return KVCacheManager(KVCacheConfig(blocks, [], groups), 64, BLOCK, BLOCK)


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


def test_a_conversation_is_hashed_once_for_all_adapters() -> None:
    hashed = list[Any]()

    def counted(block: Any) -> bytes:
        hashed.append(block)
        return sha256(block)

    hasher = new_hasher(counted)
    for number in range(10):
        hashes(alora(f"rule {number}", 1 + number, start=13), hasher=hasher)
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


allocations = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=5),  # which of two blocks stands where
    st.integers(0, BLOCK + 2),  # tokens behind them, its own
    st.integers(0, BLOCK - 1),  # tokens behind the cached ones that a KV connector brings
    st.just(100) | st.integers(1, 2 * BLOCK),  # tokens that the step has room for
    st.booleans(),  # whether it stays
)


@settings(deadline=None)
@given(st.lists(allocations, min_size=2, max_size=12))
def test_whatever_is_asked_the_step_is_noted_and_cached_tokens_are_counted_as_by_vllm(
    requests: list[Any],
) -> None:
    cache, hasher, held = cache_of(16), new_hasher(), list[Request]()
    estimate = KVCacheManager.estimate_cached_tokens.__wrapped__  # type: ignore[attr-defined]
    for number, (blocks, behind, elsewhere, chunk, stays) in enumerate(requests):
        request = request_of(number, tokens_of(blocks, [7 + number] * behind), hasher)
        computed, cached, _ = cache.get_computed_blocks(request)
        external = min(elsewhere, request.num_tokens - cached - 1)
        new_tokens = min(request.num_tokens - cached - external, chunk)
        held.append(request)
        given_blocks = cache.allocate_slots(
            request,
            new_tokens,
            num_new_computed_tokens=cached,
            new_computed_blocks=computed,
            num_external_computed_tokens=external,
        )
        is_admitted = given_blocks is not None
        if is_admitted:
            noted = request.computed_after_step, request.tokens_in_step  # type: ignore[attr-defined]
            assert noted == (cached + external + new_tokens, new_tokens)
            assert cache.estimate_cached_tokens(request) == estimate(cache, request)
        while held and not (stays and is_admitted):
            cache.free(held.pop())
            if is_admitted:
                break
