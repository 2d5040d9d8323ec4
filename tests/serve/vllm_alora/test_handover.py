"""The activation point crosses to another process, and nothing unchecked gets in."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_alora
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.lora.variants import calculate_alora_offsets
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm_alora.handover import FIRST_DERIVED_ID, KEY, NEAR_END, ActivatedRequest, activation_start

pytestmark = pytest.mark.slow

vllm_alora.register()


def received(core: Any, lora: LoRARequest | None, extra_args: Any, *, pools: bool = False) -> Any:
    """What the adapter's request has become in the scheduler, on its way through both processes."""
    request = EngineCoreRequest(
        request_id="request",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=None if pools else SamplingParams(max_tokens=1, extra_args=extra_args),
        pooling_params=PoolingParams() if pools else None,
        arrival_time=0.0,
        lora_request=lora,
        cache_salt=None,
        data_parallel_rank=None,
    )
    arrived = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))
    assert isinstance(arrived, EngineCoreRequest)
    found, _ = EngineCore.preprocess_add_request(core, arrived)
    return found.lora_request


@pytest.fixture
def core() -> Any:
    """What of an engine core the handover uses."""
    return SimpleNamespace(mm_receiver_cache=None, request_block_hasher=None)


def test_the_activation_point_and_the_content_reach_the_scheduler(core: Any) -> None:
    extra_args = {KEY: [93, "abc"], "mine": 1}
    lora = received(core, LoRARequest("rule", 7, "/adapter"), extra_args)
    assert isinstance(lora, ActivatedRequest)
    assert (lora.lora_name, lora.lora_int_id, lora.lora_path) == ("rule", 7, "/adapter")
    assert (lora.activation_start, lora.content) == (93, "abc")
    assert received(core, None, {KEY: [0, "forged"]}) is None


@pytest.mark.parametrize("pools", [False, True])
def test_a_request_that_bypassed_the_input_processor_is_refused(core: Any, *, pools: bool) -> None:
    with pytest.raises(VLLMValidationError, match="adapter 'rule' bypassed the input processor"):
        received(core, LoRARequest("rule", 7, "/adapter"), None, pools=pools)


def ids_of(core: Any, contents: list[str]) -> list[int]:
    """The adapter ids of requests with these contents, which all come under one number."""
    ids = []
    for content in contents:
        lora = received(core, LoRARequest("rule", 3, "/adapter"), {KEY: [0, content]})
        ids.append(lora.lora_int_id)
    return ids


def test_one_id_means_one_content_whichever_front_end_asks(core: Any) -> None:
    """Each front end has its own numbers; what they have in common is the engine core."""
    ids = ids_of(core, [f"{number:064x}" for number in (1, 2, 1, 3, 2)])
    assert ids[0] == ids[2] == 3 and ids[1] == ids[4]
    assert len(set(ids)) == 3
    assert all(FIRST_DERIVED_ID <= derived < 2**31 for derived in (ids[1], ids[3]))


def test_contents_whose_beginnings_are_alike_have_ids_of_their_own(core: Any) -> None:
    assert len(set(ids_of(core, ["f" * 40 + end for end in "abc"]))) == 3


few_ids = st.integers(0, 2)


@given(
    prompt=st.lists(few_ids, min_size=1, max_size=12),
    invocation=st.lists(few_ids, min_size=1, max_size=4),
)
def test_the_activation_point_is_peft_s(prompt: list[int], invocation: list[int]) -> None:
    (offset,) = calculate_alora_offsets(
        {"a": SimpleNamespace(alora_invocation_tokens=invocation)}, "a", torch.tensor([prompt])
    )
    assert activation_start(prompt, invocation) == (
        None if offset is None else len(prompt) - offset
    )


def test_the_last_whole_occurrence_counts_from_its_first_token_however_far_it_is() -> None:
    assert activation_start([1, 2, 9, 1, 2, 9, 9], (1, 2)) == 3
    assert activation_start([1, 2, 3, 1, 2], (1, 2, 3)) == 0
    assert activation_start([1, 2], (1, 2, 3)) is None
    for behind in (NEAR_END - 2, NEAR_END - 1, NEAR_END, 3 * NEAR_END):
        assert activation_start([9, 1, 2, *[5] * behind], (1, 2)) == 1
        assert activation_start([1, 2, 1, *[5] * behind], (1, 2)) == 0


def test_an_activated_request_survives_the_way_to_a_worker_process() -> None:
    request = ActivatedRequest("rule", 7, "/adapter", activation_start=93, content="abc")
    arrived = pickle.loads(pickle.dumps(request))
    assert type(arrived) is ActivatedRequest and arrived.lora_name == "rule"
    assert (arrived.activation_start, arrived.content) == (93, "abc")


def test_in_a_batch_two_versions_of_one_name_are_two_adapters_and_two_prompts_are_one() -> None:
    old = ActivatedRequest("rule", 7, "/adapter", content="old")
    new = ActivatedRequest("rule", 8, "/adapter", content="new")
    assert old != new and len({old, new}) == 2
    assert len({LoRARequest("rule", 7, "/a"), LoRARequest("rule", 8, "/a")}) == 1
    prompts = [ActivatedRequest("rule", 7, "/a", activation_start=start) for start in (0, 40, 93)]
    assert len(set(prompts)) == 1
