"""Which KV blocks two requests share, decided by vLLM's own requests and block hasher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import vllm_alora
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.request import Request
from vllm_alora.activation import ActivatedRequest
from vllm_alora.kv.block_hash import Hashed
from vllm_alora.shared_prompt import Prefix, SharedPrompt

from tests.serve.vllm_alora.kv.caches import BLOCK, cache_of, request_of

pytestmark = pytest.mark.slow

PROMPT = list(range(20))  # five full blocks


@pytest.fixture(autouse=True, scope="module")
def patched() -> None:
    vllm_alora.register()
    kv_cache_utils.init_none_hash(sha256)


def hashes(
    lora: LoRARequest | None,
    cache_salt: str | None = None,
    prompt: list[int] = PROMPT,
    hasher: Any = None,
) -> list[Any]:
    params = SamplingParams(max_tokens=1)
    hasher = hasher or kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    return Request(
        "request",
        prompt,
        params,
        None,
        lora_request=lora,
        cache_salt=cache_salt,
        block_hasher=hasher,
    ).block_hashes


def alora(
    name: str = "rule", adapter_id: int = 1, start: int = 12, content: str = "abc"
) -> ActivatedRequest:
    return ActivatedRequest(name, adapter_id, f"/{name}", activation_start=start, content=content)


def shared(one: LoRARequest | None, other: LoRARequest | None) -> list[bool]:
    """Block for block, whether the two requests have the same key."""
    return [left == right for left, right in zip(hashes(one), hashes(other), strict=True)]


def test_blocks_before_the_activation_point_are_the_bases() -> None:
    assert shared(alora(start=12), None) == [True, True, True, False, False]


def test_a_block_that_straddles_the_activation_point_is_not_shared() -> None:
    assert (
        shared(alora(start=13), None)
        == shared(alora(start=15), None)
        == [True, True, True, False, False]
    )
    assert shared(alora(start=11), None) == [True, True, False, False, False]


def test_a_block_that_is_cut_elsewhere_is_another() -> None:
    assert shared(alora(start=13), alora(start=15)) == [True, True, True, False, False]


def test_a_prompt_that_starts_with_the_invocation_shares_nothing() -> None:
    assert not any(shared(alora(start=0), None))


def test_adapters_share_the_blocks_before_their_activation_points_only() -> None:
    assert shared(alora("one", 1), alora("other", 2)) == [True, True, True, False, False]


def test_adapters_that_activate_elsewhere_share_up_to_the_first_of_them() -> None:
    assert shared(alora("one", 1, start=8), alora("other", 2, start=16)) == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_plain_lora_shares_nothing_with_the_base() -> None:
    assert not any(shared(alora(start=0), None)) and not any(
        shared(LoRARequest("lora", 1, "/lora"), None)
    )


def test_other_weights_under_the_same_name_and_path_share_no_block_of_the_adapter() -> None:
    assert shared(alora(content="old"), alora(content="new")) == [True, True, True, False, False]
    assert not any(shared(alora(start=0, content="old"), alora(start=0, content="new")))


def test_the_same_adapter_shares_all_its_blocks() -> None:
    assert all(shared(alora(), alora()))


def test_a_cache_salt_still_parts_the_base_blocks() -> None:
    assert hashes(alora(), cache_salt="tenant")[0] != hashes(alora())[0]
    assert hashes(alora(), cache_salt="tenant")[:3] == hashes(None, cache_salt="tenant")[:3]


def test_a_conversation_is_hashed_once_whatever_the_number_of_adapters() -> None:
    calls = list[Any]()

    def counted(block: Any) -> bytes:
        calls.append(block)
        return sha256(block)

    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, counted)
    for number in range(10):
        hashes(alora(f"rule {number}", 1 + number, start=13), hasher=hasher)
    assert (
        len(calls) == 3 + 10 * 2
    )  # the base's blocks, then the one that is cut and the one behind it, by every adapter
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


def test_prompts_that_say_what_they_share_have_the_keys_of_plain_lists() -> None:
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    same, other = Prefix(PROMPT[:13]), Prefix([*PROMPT[:11], 99, 98])
    for number, prefix in enumerate([same, same, other, same, other, other]):
        prompt = SharedPrompt(prefix, [50, 51, 52, 53])
        lora = alora(f"rule {number}", start=13)
        assert hashes(lora, prompt=prompt, hasher=hasher) == hashes(lora, prompt=list(prompt))


asked = st.tuples(
    st.sampled_from([None, "lora", "one", "other"]),
    st.integers(0, 24),  # activation point
    st.sampled_from([None, "tenant"]),
    st.lists(
        st.integers(0, 1), min_size=1, max_size=6
    ),  # which of two blocks' worth of tokens stands where
    st.integers(0, BLOCK),  # tokens beyond whole blocks
)


@given(st.lists(asked, min_size=2, max_size=8))
def test_whatever_was_asked_before_the_keys_are_those_of_the_request_alone(
    requests: list[Any],
) -> None:
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    for name, start, salt, blocks, beyond in requests:
        prompt = [
            token for block in blocks for token in range(100 * block, 100 * block + BLOCK)
        ] + [7] * beyond
        lora = (
            {None: None, "lora": LoRARequest("lora", 3, "/lora")}.get(name)
            if name in (None, "lora")
            else alora(name, start=start)
        )
        assert hashes(lora, salt, prompt, hasher) == hashes(lora, salt, prompt)


def test_a_conversation_is_looked_up_once_whatever_the_number_of_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, hasher = cache_of(64), kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    looked_up = list[bytes]()
    found = cache.block_pool.get_cached_block
    monkeypatch.setattr(
        cache.block_pool,
        "get_cached_block",
        lambda name, groups: looked_up.append(name) or found(name, groups),
    )
    for number in range(10):
        request = request_of(number, PROMPT, hasher, alora(f"rule {number}", 1 + number, start=13))
        computed, tokens, _ = cache.get_computed_blocks(request)
        assert tokens == (12 if number else 0)
        assert cache.allocate_slots(request, len(PROMPT) - tokens, tokens, computed) is not None
    assert (
        len(looked_up) == 1 + 4 + 8
    )  # the first finds none, the second three, and each of the others asks for the one behind


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=6),
            st.integers(0, BLOCK),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_whatever_was_asked_before_the_blocks_found_are_vllms(requests: list[Any]) -> None:
    """In a cache that has to give blocks away, with requests that end at once and others that
    stay.
    """
    cache, hasher, held = (
        cache_of(12),
        kv_cache_utils.get_request_block_hasher(BLOCK, sha256),
        list[Request](),
    )
    plain = UnitaryKVCacheCoordinator.find_longest_cache_hit.__wrapped__
    for number, (blocks, beyond, stays) in enumerate(requests):
        request = request_of(
            number,
            [token for block in blocks for token in range(100 * block, 100 * block + BLOCK)]
            + [7] * beyond,
            hasher,
        )
        want, length, _ = plain(cache.coordinator, request.block_hashes, request.num_tokens - 1)
        computed, tokens, _ = cache.get_computed_blocks(request)
        assert tokens == length and [block.block_hash for block in computed.blocks[0]] == [
            block.block_hash for block in want[0]
        ]
        if cache.allocate_slots(request, request.num_tokens - tokens, tokens, computed) is None:
            while held:
                cache.free(held.pop())
        elif stays:
            held.append(request)
        else:
            cache.free(request)
