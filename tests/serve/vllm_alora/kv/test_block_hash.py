"""Which KV blocks two requests share, decided by vLLM's own requests and block hasher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.request import Request
from vllm_alora.handover import ActivatedRequest
from vllm_alora.kv.block_hash import Hashed
from vllm_alora.shared_prompt import Prefix, SharedPrompt

from tests.serve.vllm_alora.kv.caches import BLOCK, cache_of, new_hasher, request_of, tokens_of

pytestmark = pytest.mark.slow

PROMPT = list(range(20))  # five full blocks


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
    pairs = zip(hashes(one), hashes(other), strict=True)
    assert [left == right for left, right in pairs] == [number < shared for number in range(5)]


def test_a_cache_salt_still_parts_the_base_blocks() -> None:
    assert hashes(alora(), cache_salt="tenant")[0] != hashes(alora())[0]
    assert hashes(alora(), cache_salt="tenant")[:3] == hashes(None, cache_salt="tenant")[:3]


def test_a_conversation_is_hashed_once_for_all_adapters() -> None:
    calls = list[Any]()

    def counted(block: Any) -> bytes:
        calls.append(block)
        return sha256(block)

    hasher = new_hasher(counted)
    for number in range(10):
        hashes(alora(f"rule {number}", 1 + number, start=13), hasher=hasher)
    # The base's blocks once; the one that is cut and the one behind it, by every adapter.
    assert len(calls) == 3 + 10 * 2
    calls.clear()
    hashes(alora(start=25), prompt=[*PROMPT[:13], *range(50, 65)], hasher=hasher)
    assert len(calls) == 4  # a conversation that grew: what is new


def test_a_prompt_that_says_what_it_shares_is_not_compared_and_has_the_same_keys() -> None:
    class Unread(list[int]):
        """Token ids that fail when they are compared."""

        def __eq__(self, other: object) -> bool:
            pytest.fail("the conversation was compared")

    prefix = Prefix(PROMPT[:13])
    hashed = Hashed(Unread(PROMPT[:12]), [b"1", b"2", b"3"], None, prefix)
    request = SimpleNamespace(prompt_token_ids=SharedPrompt(prefix, [7]), cache_salt=None)
    assert hashed.begins(request, base_tokens=13)
    assert not hashed.begins(request, base_tokens=11)
    request.cache_salt = "tenant"
    assert not hashed.begins(request, base_tokens=13)
    hasher, same, other = new_hasher(), Prefix(PROMPT[:13]), Prefix([*PROMPT[:11], 99, 98])
    for number, each in enumerate([same, same, other, same, other, other]):
        prompt = SharedPrompt(each, [50, 51, 52, 53])
        lora = alora(f"rule {number}", start=13)
        assert hashes(lora, prompt=prompt, hasher=hasher) == hashes(lora, prompt=list(prompt))


asked = st.tuples(
    st.sampled_from([None, "lora", "one", "other"]),
    st.integers(0, 24),  # activation point
    st.sampled_from([None, "tenant"]),
    st.lists(st.integers(0, 1), min_size=1, max_size=6),  # which of two blocks stands where
    st.integers(0, BLOCK),  # tokens beyond whole blocks
)


@given(st.lists(asked, min_size=2, max_size=8))
def test_whatever_was_asked_before_keys_are_of_the_request_alone(requests: list[Any]) -> None:
    hasher = new_hasher()
    for name, start, salt, blocks, beyond in requests:
        prompt = tokens_of(blocks, [7] * beyond)
        lora: LoRARequest | None = alora(name, start=start)
        if name in (None, "lora"):
            lora = name and LoRARequest("lora", 3, "/lora")
        assert hashes(lora, salt, prompt, hasher) == hashes(lora, salt, prompt)


def test_a_conversation_is_looked_up_once_for_all_adapters(monkeypatch: MonkeyPatch) -> None:
    cache, hasher = cache_of(64), new_hasher()
    looked_up = list[bytes]()
    found = cache.block_pool.get_cached_block

    def counted(name: Any, groups: Any) -> Any:
        looked_up.append(name)
        return found(name, groups)

    monkeypatch.setattr(cache.block_pool, "get_cached_block", counted)
    for number in range(10):
        request = request_of(number, PROMPT, hasher, alora(f"rule {number}", 1 + number, start=13))
        computed, tokens, _ = cache.get_computed_blocks(request)
        assert tokens == (12 if number else 0)
        assert cache.allocate_slots(request, len(PROMPT) - tokens, tokens, computed) is not None
    # The first finds none, the second three; each other one asks for the one behind.
    assert len(looked_up) == 1 + 4 + 8


found_blocks = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(0, BLOCK), st.booleans()
)


@given(st.lists(found_blocks, max_size=12))
def test_whatever_was_asked_before_the_blocks_found_are_vllms(requests: list[Any]) -> None:
    """In a cache that has to give blocks away; some requests end at once, others stay."""
    cache, hasher, held = cache_of(12), new_hasher(), list[Request]()
    plain = UnitaryKVCacheCoordinator.find_longest_cache_hit.__wrapped__
    for number, (blocks, beyond, stays) in enumerate(requests):
        request = request_of(number, tokens_of(blocks, [7] * beyond), hasher)
        (want,), length, _ = plain(cache.coordinator, request.block_hashes, request.num_tokens - 1)
        computed, tokens, _ = cache.get_computed_blocks(request)
        assert tokens == length
        found = [block.block_hash for block in computed.blocks[0]]
        assert found == [block.block_hash for block in want]
        if cache.allocate_slots(request, request.num_tokens - tokens, tokens, computed) is None:
            while held:
                cache.free(held.pop())
        elif stays:
            held.append(request)
        else:
            cache.free(request)
